"""What an accumulator cannot be built from: each with a sentence that says what to do."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from gradaccum.errors import ArgumentError

T = TypeVar("T")

_REMEDIES: Mapping[type, str] = MappingProxyType(
    {
        Optimizer: "Pass for example torch.optim.AdamW(model.parameters(), fused=True).",
        LRScheduler: "Pass one of torch.optim.lr_scheduler, built on the optimizer.",
        AveragedModel: "Pass gradaccum.EMA(model, decay=0.999).",
    }
)


def refuse_unused(**given: object) -> None:
    """Refuse arguments that only an accumulator which cuts effective batches uses.

    Args:
        given: By name; None where the user left one out.

    Raises:
        ArgumentError: One was given.
    """
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"accumulator({name}=...)",
                expected="a loss function beside it",
                got="none, so that the micro-batches are your own loop's",
                remedy=f"Pass loss and call step(batch), or leave {name} out.",
            )


def device_of(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """Return the device that micro-batches go to, by the name that its tensors have.

    Args:
        device: What the user passed.
        model: Says where, if the user does not.

    Returns:
        The device.

    Raises:
        ArgumentError: There is no such device here.
    """
    if device is None:
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        return torch.empty(0, device=device).device  # "cuda" is then "cuda:0", as tensors say
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"accumulator(device={device!r})",
            expected="a device of this machine",
            got=str(error).splitlines()[0],
            remedy='Pass "cpu" or "cuda", or leave device out: it is then where the model is.',
        ) from error


def all_of(given: Any, kind: type[T], *, call: str) -> tuple[T, ...]:
    """Return one or several things as a tuple.

    Args:
        given: One, or a sequence.
        kind: What each must be.
        call: What was called, in the user's spelling.

    Returns:
        All of them.

    Raises:
        ArgumentError: One is of another kind.
    """
    several = given if isinstance(given, Sequence) else (given,)
    for one in several:
        if not isinstance(one, kind):
            raise ArgumentError(
                call,
                expected=f"one torch {kind.__name__}, or a sequence of them",
                got=type(one).__name__,
                remedy=_REMEDIES[kind],
            )
    return tuple(several)


def check_model(model: object) -> None:
    """Refuse what is no model.

    Args:
        model: What the user passed.

    Raises:
        ArgumentError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            "accumulator(model, optimizer)",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            remedy="Put several modules together: torch.nn.ModuleList([model, other]).",
        )


def check_precision(scaler: object, sum_dtype: object) -> None:
    """Refuse a loss scale or a dtype of sums that is none.

    Args:
        scaler: What the user passed.
        sum_dtype: Beside it.

    Raises:
        ArgumentError: One is something else.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ArgumentError(
            "accumulator(scaler=...)",
            expected="a torch.amp.GradScaler",
            got=type(scaler).__name__,
            remedy='Pass torch.amp.GradScaler("cuda"), or leave it out: bfloat16 needs none.',
        )
    if not isinstance(sum_dtype, torch.dtype) or not sum_dtype.is_floating_point:
        raise ArgumentError(
            f"accumulator(sum_dtype={sum_dtype!r})",
            expected="a floating-point dtype",
            got=repr(sum_dtype),
            remedy="Leave it out for torch.float32.",
        )


def check_masters(master_weights: object, stochastic_rounding: object, sum_dtype: object) -> None:
    """Refuse wide copies of parameters that contradict what is beside them.

    Args:
        master_weights: What the user passed.
        stochastic_rounding: Beside it.
        sum_dtype: The least of gradient sums.

    Raises:
        ArgumentError: They contradict each other.
    """
    given = {"master_weights": master_weights, "stochastic_rounding": stochastic_rounding}
    asked = [name for name, value in given.items() if value]
    told = ", ".join(f"{name}={given[name]!r}" for name in asked)
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ArgumentError(
                f"accumulator({name}={value!r})",
                expected="True or False",
                got=repr(value),
                remedy="Pass True to update parameters of 16 bits in float32.",
            )
    if len(asked) == 2:
        raise ArgumentError(
            f"accumulator({told})",
            expected="one of the two",
            got="both",
            remedy="Keep float32 copies, with master_weights, or do without them by rounding at "
            "random, with stochastic_rounding.",
        )
    if asked and sum_dtype in (torch.float16, torch.bfloat16):
        raise ArgumentError(
            f"accumulator({told}, sum_dtype={sum_dtype})",
            expected="gradient sums as wide as the copies",
            got="sums of 16 bits",
            remedy="Leave sum_dtype out for torch.float32.",
        )


def check_schedulers(schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    """Refuse a scheduler of an optimizer that is not here.

    Args:
        schedulers: What the user passed.
        optimizers: Beside them.

    Raises:
        ArgumentError: One was built on another optimizer.
    """
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
            raise ArgumentError(
                f"accumulator(scheduler={type(scheduler).__name__})",
                expected="a scheduler of the optimizer that is passed beside it",
                got="one that was built on another optimizer",
                remedy="Build the scheduler on this optimizer.",
            )


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that do not fit the model, or each other.

    Args:
        model: Whose parameters they must hold.
        optimizers: What the user passed.

    Raises:
        ArgumentError: One is LBFGS, or holds a parameter of something else, or of another one.
    """
    if not optimizers or any(isinstance(one, LBFGS) for one in optimizers):
        raise ArgumentError(
            "accumulator(model, optimizer)",
            expected="one torch Optimizer that steps from gradients, or a sequence of them",
            got="LBFGS, which evaluates the loss anew" if optimizers else "none",
            remedy="Pass for example torch.optim.AdamW(model.parameters(), fused=True).",
        )
    known = {id(parameter) for parameter in model.parameters()}
    held: set[int] = set()
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                where = f"{type(optimizer).__name__}.param_groups[{g}]['params'][{k}]"
                if id(parameter) not in known:
                    raise ArgumentError(
                        where,
                        expected=f"a parameter of the model ({type(model).__name__})",
                        got=f"another tensor of shape {tuple(parameter.shape)}",
                        remedy="Build the optimizer from model.parameters() of this very model, "
                        "or pass the modules together: torch.nn.ModuleList([model, other]).",
                    )
                if id(parameter) in held:
                    raise ArgumentError(
                        where,
                        expected="each parameter in one optimizer",
                        got="one that an earlier optimizer holds",
                        remedy="Take it out of one of them.",
                    )
                held.add(id(parameter))


def check_lockstep(
    *, nonfinite: str, ranks: int, told: Mapping[str, object], has_loss: bool
) -> None:
    """Refuse what micro-batches in lockstep cannot have.

    Args:
        nonfinite: What a loss that is not finite does.
        ranks: How many ranks share an effective batch.
        told: How large micro-batches may be, by name; None where the user left one out.
        has_loss: Whether there is a loss function.

    Raises:
        ArgumentError: One of them is given, or is missing.
    """
    wrong = None
    if not has_loss:
        wrong = "a loss function", "none, so that forward passes are your own loop's"
        remedy = "Pass loss and call step(batch), which runs the micro-batches side by side."
    elif told["memory"] is not None or not any(told.values()):
        wrong = "micro_batch_size or micro_batch_tokens beside it", "a budget of memory"
        remedy = "Pass micro_batch_size: what the graph of the effective batch takes is not sized."
    elif nonfinite == "drop_micro_batch":
        wrong = 'nonfinite="raise" or "skip_step"', "micro-batches to leave out"
        remedy = "In what they share, all samples have taken part by the time that one is known."
    elif ranks > 1:
        wrong = "one process", f"{ranks} ranks"
        remedy = "Use torch.nn.SyncBatchNorm, with one micro-batch on each rank."
    if wrong:
        expected, got = wrong
        call = "accumulator(lockstep=True)"
        raise ArgumentError(call, expected=expected, got=got, remedy=remedy)
