"""Micro-batches that run on fake tensors: shapes and bytes as in earnest, and no numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gradaccum.dtypes import Masters, sum_dtype_of
from gradaccum.errors import GradaccumError, PredictionError
from gradaccum.feed import Feed
from gradaccum.levers import Levers, pulled
from gradaccum.loss import Tally
from gradaccum.memory import Budget, LiveBytes, Needs, Probe, needs_of
from gradaccum.prepared import Prepared
from gradaccum.probing import watched
from gradaccum.protocols import LossFunction
from gradaccum.snapshot import preserved
from gradaccum.tree import flat, map_leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a micro-batch computes.

    Args:
        count: Its samples.
        length: What they are padded to.
        flops: Floating-point operations of forward and backward, recomputation included.
    """

    count: int
    length: int
    flops: int


class FakeTrial:
    """Predicts what micro-batches need, without running anything or having a device.

    Args:
        model: Copied; of its parameters nothing but shapes.
        optimizers: Hold parameters of it.
        loss: ``loss(model, micro_batch)``; must not look at numbers.
        chunked_loss: The same with a head in chunks, if there is one.
        feed: Collates micro-batches.
        prepared: Where samples are taken from.
        levers: Pulled on the copy.
        sum_dtype: The least of gradient sums.
        masters: What parameters of fewer bits than that are updated by.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        loss: LossFunction,
        feed: Feed,
        prepared: Prepared,
        chunked_loss: LossFunction | None = None,
        levers: Levers | None = None,
        sum_dtype: torch.dtype = torch.float32,
        masters: Masters = Masters.NONE,
    ) -> None:
        self._real, self._optimizers = model, tuple(optimizers)
        self._sum_dtype, self._masters = sum_dtype, masters
        self._feed, self._prepared = feed, prepared
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)  # a loss may close over tensors
        with FakeCopyMode(self._fake):
            self._model = deepcopy(model)
        held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        pairs = zip(model.parameters(), self._model.parameters(), strict=True)
        self._trained = [fake for real, fake in pairs if id(real) in held and real.requires_grad]
        levers = levers or Levers()
        self._parking = levers.parking  # here in shapes alone, not through a host
        levers = replace(levers, parking=False)
        self._loss = pulled(levers, self._model, loss, chunked_loss)
        self.work: list[Work] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make gradient sums, of which there are none before.

        Yields:
            Nothing.
        """
        with preserved(self._real):
            for parameter in self._trained:
                parameter.grad_dtype = dtype = sum_dtype_of(parameter, self._sum_dtype)
                with self._fake:
                    parameter.grad = torch.empty_like(parameter, dtype=dtype)
            yield

    def needs(self) -> Needs:
        """Return what is held whatever the size of a micro-batch."""
        return needs_of(
            self._real, self._optimizers, sum_dtype=self._sum_dtype, masters=self._masters
        )

    def probe(self, positions: np.ndarray, budget: Budget | None = None) -> Probe:
        """Return what a micro-batch of the samples at these positions needs.

        Args:
            positions: In the effective batch.
            budget: Of no matter here, where nothing takes memory.

        Returns:
            Its timeline.

        Raises:
            GradaccumError: The loss is none, whatever runs it.
            PredictionError: The loss or the model cannot run without numbers.
        """
        real = [self._feed.peek(self._prepared.samples, positions.tolist()) for _ in "12"]
        try:
            return self._predicted(real, positions)
        except GradaccumError:
            raise
        except DataDependentOutputException as error:
            raise PredictionError(
                "predicting memory without running",
                expected="a model and a loss that run on shapes alone",
                got=f"a look at numbers: {error}",
                remedy="Leave item(), bool(tensor) and indexing by masks out of forward and loss; "
                "or train with memory=..., which probes in earnest.",
            ) from error
        except Exception as error:  # whatever a user's model may raise on fake tensors
            raise PredictionError(
                "predicting memory without running",
                expected="a model and a loss that run on shapes alone",
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                remedy=f"See whether the loss of {len(positions)} of the samples can be computed.",
            ) from error

    def _predicted(self, real: Sequence[Any], positions: np.ndarray) -> Probe:
        micro, waiting = (map_leaves(self._faked, one) for one in real)
        live, flops = LiveBytes(), _Flops()
        sums = [p.grad for p in self._trained if p.grad is not None]
        hooks = saved_tensors_hooks(_packed, self._unpacked) if self._parking else nullcontext()
        with self._fake, flops, hooks:
            probe = watched(
                live,
                held=[*self._model.parameters(), *self._model.buffers(), *sums],
                inputs=[leaf for leaf in flat((micro, waiting)) if isinstance(leaf, Tensor)],
                run=partial(self._run, micro, live),
                count=len(positions),
                length=self._prepared.padded(positions),
            )
        self.work.append(Work(count=probe.count, length=probe.length, flops=flops.total))
        return probe

    def _run(self, micro: Any, meter: LiveBytes) -> int:
        """Run forward and backward; return the live bytes between the two."""
        found = self._loss(self._model, micro)  # unchecked: its weight has no number
        terms = found if isinstance(found, Mapping) else {"": found}
        kept = meter.live
        total = Tally(self._prepared.weighed).differentiable(terms)
        torch.autograd.backward(total, inputs=self._trained)
        return kept

    def _unpacked(self, packed: Any) -> Tensor:
        """Bring a parked tensor back: another storage."""
        size, stride, dtype, device = packed
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def _faked(self, leaf: Any) -> Any:
        return self._fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf


def _packed(tensor: Tensor) -> Any:
    """Park a tensor: nothing of it stays on the device."""
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


class _Flops(TorchDispatchMode):
    """Counts as torch's FlopCounterMode does, whose hooks on modules would keep tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and add what it computes."""
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        elif func._schema.name == "torch_nn::_linear_cross_entropy_batch_chunked":
            (labels, dim), classes, gradients = args[0].shape, args[1].shape[0], sum(args[12:14])
            self.total += 2 * labels * dim * classes * (1 + gradients)  # it makes them on the way
        return out
