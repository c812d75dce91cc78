"""Every rank has a copy of the model, and computes its share of each effective batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from gradaccum.errors import ArgumentError
from gradaccum.protocols import GradientSync, LocalSync

K = TypeVar("K")

_BUCKET = 25 << 20  # bytes that are reduced at once, as in DistributedDataParallel
_NONE, _DENSE, _SPARSE = range(3)
_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})


class DataParallel:
    """Ranks that sum gradients once an effective batch, when all its micro-batches are in.

    The hooks of DistributedDataParallel, which reduce in a backward pass, stay at rest: they would
    wait for parameters that another accumulator trains, and for ranks that have no sample. So
    nothing is exchanged in a forward or backward pass, and each rank may take as many micro-batches
    as it likes, or run one again that did not fit.

    Args:
        replicas: The models, of one process group; they reduce nothing by themselves any more.
    """

    def __init__(self, replicas: Sequence[DistributedDataParallel]) -> None:
        self._replicas = tuple(replicas)
        self._group = replicas[0].process_group
        self._device = next(replicas[0].parameters()).device
        self.rank: int = dist.get_rank(self._group)
        self.ranks: int = dist.get_world_size(self._group)
        # What its no_sync() sets, which would not do for loops that overlap: each would put back
        # what it has found. The second is of buffers, in the first forward pass.
        for replica in self._replicas:
            replica.require_backward_grad_sync = replica.require_forward_param_sync = False

    def reduce(self, parameters: Sequence[Parameter]) -> None:
        """Sum gradients over ranks, in place; and take over the buffers of the first rank.

        A parameter that no loss has reached on this rank, but on another, gets a gradient here.
        """
        kinds = torch.tensor(list(map(_kind, parameters)), device=self._device, dtype=torch.uint8)
        dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=self._group)
        dense: list[Tensor] = []
        for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
            if kind == _NONE:
                continue
            if parameter.grad is None:
                parameter.grad = _nothing(parameter, sparse=kind == _SPARSE)
            if kind == _SPARSE:
                parameter.grad = parameter.grad.coalesce()
                dist.all_reduce(parameter.grad, group=self._group)
            else:
                dense.append(parameter.grad)
        for bucket in _buckets(dense):
            with _flat(bucket) as flat:
                dist.all_reduce(flat, group=self._group)
        first = dist.get_global_rank(self._group, 0)
        buffers = [b for r in self._replicas if r.broadcast_buffers for b in r.modules_buffers]
        for bucket in _buckets(buffers):
            with _flat(bucket) as flat:
                dist.broadcast(flat, src=first, group=self._group)

    def totals(self, numbers: Mapping[K, float]) -> dict[K, float]:
        """Return sums over ranks, added up in the order of ranks; who lacks one adds nothing."""
        told: list[Mapping[K, float]] = [{}] * self.ranks
        dist.all_gather_object(told, dict(numbers), group=self._group)
        found: dict[K, float] = {}
        for name, number in chain.from_iterable(one.items() for one in told):
            found[name] = found.get(name, 0.0) + number
        return found


def sync_of(model: nn.Module) -> GradientSync:
    """Return how ranks agree, by what kind of model it is.

    Args:
        model: Wrapped in DistributedDataParallel, or holding models that are; or neither.

    Returns:
        The agreement; that of one process alone, where nothing is wrapped.

    Raises:
        ArgumentError: It is wrapped in a way that would reduce gradients otherwise.
    """
    modules = list(model.modules())
    for module in modules:
        if found := _SHARDED.intersection(kind.__name__ for kind in type(module).__mro__):
            raise ArgumentError(
                "accumulator(model)",
                expected="a model that is whole on each rank",
                got=f"{min(found)}, which averages gradients over ranks in each backward pass",
                remedy="Wrap the model in torch.nn.parallel.DistributedDataParallel instead.",
            )
    replicas = [one for one in modules if isinstance(one, DistributedDataParallel)]
    if not replicas:
        return LocalSync()
    groups = {id(one.process_group) for one in replicas}
    _require(len(groups) == 1, "models of one process group", f"{len(groups)} groups")
    for one in replicas:
        _require(not one._comm_hooks, "no communication hook", "one, which would not be called")
        _require(one.mixed_precision is None, "no mixed_precision", "it; use torch.autocast")
    return DataParallel(replicas)


def _require(holds: bool, expected: str, got: str) -> None:
    if not holds:
        raise ArgumentError(
            "accumulator(DistributedDataParallel(...))",
            expected=expected,
            got=got,
            remedy="Gradients are summed once an effective batch, by the accumulator.",
        )


def _kind(parameter: Parameter) -> int:
    if parameter.grad is None:
        return _NONE
    return _SPARSE if parameter.grad.is_sparse else _DENSE


def _nothing(parameter: Parameter, *, sparse: bool) -> Tensor:
    """Return a gradient of zeros, as autograd would have made it."""
    dtype = parameter.grad_dtype or parameter.dtype
    if sparse:
        return torch.zeros(
            parameter.shape, dtype=dtype, device=parameter.device, layout=torch.sparse_coo
        )
    return torch.zeros_like(parameter, dtype=dtype)


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups of one dtype and device, of some 25 MiB each."""
    found: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        alike = found.setdefault((tensor.dtype, tensor.device), [[]])
        if alike[-1] and sum(one.nbytes for one in alike[-1]) + tensor.nbytes > _BUCKET:
            alike.append([])
        alike[-1].append(tensor)
    return [bucket for alike in found.values() for bucket in alike]


@contextmanager
def _flat(bucket: list[Tensor]) -> Iterator[Tensor]:
    """Return a context with one tensor that holds all of a bucket, which then takes it over."""
    flat = torch.cat([one.detach().reshape(-1) for one in bucket])
    yield flat
    parts = torch.split(flat, [one.numel() for one in bucket])
    with torch.no_grad():
        for one, part in zip(bucket, parts, strict=True):
            one.copy_(part.view_as(one))
