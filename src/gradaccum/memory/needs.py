"""What a training step holds besides activations, by part, predicted before it is there."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from gradaccum.dtypes import Masters, sum_dtype_of
from gradaccum.memory.meter import LiveBytes
from gradaccum.tree import flat, map_leaves

# Bytes for each number of a parameter while it is rounded: a 16-bit gradient; or a copy that is
# compared with it; or random bits, and what comes of them.
_ROUNDING: Mapping[Masters, int] = MappingProxyType(
    {Masters.NONE: 2, Masters.KEPT: 9, Masters.PASSING: 13}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Bytes on the device between two micro-batches, whatever their size.

    Args:
        parameters: Of the model, frozen ones included.
        buffers: Of the model.
        snapshot: A copy of the buffers, which a step keeps so that it can be run again.
        gradient_sums: One for each parameter that is trained.
        optimizer_state: After the first optimizer step.
        master_weights: Wide copies of 16-bit parameters, where they are kept.
        averages: Of the weights.
        update: What an optimizer step needs besides, for its own temporaries.
    """

    parameters: int
    buffers: int
    snapshot: int
    gradient_sums: int
    optimizer_state: int
    master_weights: int
    averages: int
    update: int

    @property
    def rest(self) -> int:
        """What is there before each micro-batch but the first."""
        return self.least - self.update

    @property
    def least(self) -> int:
        """The most that is there in an optimizer step: no budget can be below."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return bytes by part, in the words of a sentence."""
        return {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}


def needs_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    sum_dtype: torch.dtype = torch.float32,
    masters: Masters = Masters.NONE,
    averages: Sequence[nn.Module] = (),
) -> Needs:
    """Predict what a model and its optimizers hold.

    Args:
        model: The model.
        optimizers: Hold parameters of it.
        sum_dtype: The least of gradient sums.
        masters: What parameters of fewer bits than that are updated by.
        averages: Of the weights.

    Returns:
        The needs. The optimizer's share comes from a step of its twin on fake tensors, which run
        nothing; or, where it looks at their numbers, on copies of one parameter at a time.
    """
    buffers = _bytes_of(model.buffers())
    trained = [
        p for o in optimizers for g in o.param_groups for p in g["params"] if p.requires_grad
    ]
    # A sum is the parameter's own, also where parameters share a storage.
    sums = sum(p.numel() * sum_dtype_of(p, sum_dtype).itemsize for p in trained)
    narrow = [p for p in trained if sum_dtype_of(p, sum_dtype) != p.dtype]
    stepped = {} if masters is Masters.NONE else {p: sum_dtype_of(p, sum_dtype) for p in narrow}
    copies = sum(p.numel() * dtype.itemsize for p, dtype in stepped.items())
    state = update = 0
    for optimizer in optimizers:
        held, most = _predicted_step(optimizer, stepped)
        state += held
        update = max(update, most - held)  # they step one after the other
    # What is narrow is rounded, or compared with its copy, one parameter after the other.
    one_by_one = [p.numel() * _ROUNDING[masters] for p in narrow]
    if masters is Masters.NONE:
        update += sum(p.nbytes for p in trained) - sums  # sums are wider no more
    update = max(0, update, *one_by_one) + (copies if masters is Masters.PASSING else 0)
    return Needs(
        parameters=_bytes_of([*model.parameters(), *trained]),
        buffers=buffers,
        snapshot=buffers,
        gradient_sums=sums,
        optimizer_state=state,
        master_weights=copies if masters is Masters.KEPT else 0,
        averages=_bytes_of(t for one in averages for t in (*one.parameters(), *one.buffers())),
        update=update,
    )


def held_bytes(
    model: nn.Module, optimizers: Sequence[Optimizer], averages: Sequence[nn.Module] = ()
) -> int:
    """Return the bytes of what a step uses that are there already.

    Args:
        model: Its parameters, buffers and gradients.
        optimizers: Their state, if they have stepped.
        averages: Of the weights.

    Returns:
        Bytes.
    """
    parameters = list(model.parameters())
    averaged = [t for one in averages for t in (*one.parameters(), *one.buffers())]
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [leaf for o in optimizers for one in o.state.values() for leaf in flat(one)]
    held = [leaf for leaf in states if isinstance(leaf, Tensor)]
    return _bytes_of([*parameters, *model.buffers(), *gradients, *held, *averaged])


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _predicted_step(optimizer: Optimizer, dtypes: Mapping[Tensor, torch.dtype]) -> tuple[int, int]:
    """Return the bytes of an optimizer's state after a step, and the most that were there in it.

    Args:
        optimizer: The optimizer.
        dtypes: Of its parameters in the step, where they are others than outside of it.
    """
    inner = next((one for one in vars(optimizer).values() if isinstance(one, Optimizer)), None)
    if inner is not None:  # a wrapper, as Accelerate's
        return _predicted_step(inner, dtypes)
    fake = FakeTensorMode()
    try:
        return _stepped(optimizer, optimizer.param_groups, partial(_faked, fake), fake, dtypes)
    except Exception:  # an optimizer looks at numbers, which fake tensors have not
        return _measured_step(optimizer, dtypes)


def _measured_step(optimizer: Optimizer, dtypes: Mapping[Tensor, torch.dtype]) -> tuple[int, int]:
    """Return the same from steps with gradients of zero, of a copy of one parameter at a time."""
    state = most = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            alone = {**group, "params": [parameter]}
            held, peak = _stepped(optimizer, [alone], torch.clone, nullcontext(), dtypes)
            state, most = state + held, max(most, peak - held)
    return state, state + most


def _stepped(
    optimizer: Optimizer,
    groups: Iterable[dict[str, Any]],
    copied: Callable[[Tensor], Tensor],
    mode: AbstractContextManager[Any],
    dtypes: Mapping[Tensor, torch.dtype],
) -> tuple[int, int]:
    """Step the twin of an optimizer.

    Args:
        optimizer: Left as it is.
        groups: Its parameter groups, or parts of them.
        copied: Copies a tensor.
        mode: Where the twin runs.
        dtypes: Of parameters that are others than outside of a step.

    Returns:
        The bytes of its state after the step, and the most that were there in it.
    """
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a scheduler's wrapper, bound to the original
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state, twin.param_groups = defaultdict(dict), []

    def copy(leaf: Any) -> Any:
        return copied(leaf.detach()) if isinstance(leaf, Tensor) else leaf

    meter = LiveBytes()
    for group in groups:
        settings = {k: v if k == "params" else map_leaves(copy, v) for k, v in group.items()}
        settings["params"] = []
        for parameter in group["params"]:
            dtype = dtypes.get(parameter, parameter.dtype)
            own = nn.Parameter(copied(parameter.detach()).to(dtype), parameter.requires_grad)
            if parameter.requires_grad:
                with mode:
                    own.grad = torch.zeros_like(own)
                meter.follow([own, own.grad])
            settings["params"].append(own)
            if parameter in optimizer.state:
                widened = partial(_widened, before=parameter.dtype, dtype=dtype)
                state = map_leaves(copy, dict(optimizer.state[parameter]))
                twin.state[own] = map_leaves(widened, state)
        twin.param_groups.append(settings)
    before = meter.live
    meter.follow(t for one in twin.state.values() for t in flat(one) if isinstance(t, Tensor))
    with mode, meter:
        twin.step()
    return meter.live - before, meter.peak - before


def _widened(leaf: Any, *, before: torch.dtype, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == before else leaf


def _faked(fake: FakeTensorMode, tensor: Tensor) -> Tensor:
    if tensor.ndim or tensor.device.type != "cpu":
        return fake.from_tensor(tensor)
    number = tensor.item()
    with fake:  # a count of steps, at which optimizers look: a fake constant keeps its number
        return torch.tensor(number, dtype=tensor.dtype)
