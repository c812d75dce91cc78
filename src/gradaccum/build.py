"""From what you have to the parts: the lower-case functions of the public face."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.accumulator import Accumulator
from gradaccum.audit import Verify
from gradaccum.batch import LengthFunction, WeighFunction, default_length
from gradaccum.collate import CollateFunction, collate_function
from gradaccum.errors import ArgumentError
from gradaccum.feed import Feed
from gradaccum.loader import EffectiveBatches, Last
from gradaccum.memory import Budget, held_bytes, require_within, usable_bytes
from gradaccum.partition import Cap, CappedCut, Cost, FixedCut, require_positive
from gradaccum.protocols import LossFunction
from gradaccum.sizing import Sizing, Told, UnderBudget
from gradaccum.update import Update

T = TypeVar("T")


def accumulator(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: LossFunction | None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_grad_norm: float | None = None,
    memory: Budget | int | str | None = None,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    cost: Cost | None = None,
    collate: CollateFunction | None = None,
    pad: Any = None,
    length: LengthFunction | None = None,
    weigh: WeighFunction | None = None,
    device: torch.device | str | None = None,
    verify: Literal["first", "never"] = "first",
    nonfinite: Literal["raise", "skip_step"] = "raise",
) -> Accumulator:
    """Build an accumulator.

    Args:
        model: The model; `loss` is called with it.
        optimizer: Any optimizer of torch's but LBFGS, or several that step together. One with
            ``fused=True`` scales gradients in its own pass: its step hooks see the sums.
        loss: ``loss(model, micro_batch)`` returning a `Loss`, the sum over the micro-batch and
            its weight, or a mapping of names to them. Without it, drive your own loop with
            `Accumulator.over` and `Accumulator.backward`.
        scheduler: Any learning-rate scheduler, or several; moved once per update.
        max_grad_norm: Bound on the 2-norm of the gradient of the effective batch.
        memory: Bytes that a step may use on the device, parameters and optimizer state included:
            ``"4GiB"`` or a number. A few small probes before the first step find the micro-batches
            that fit. By default nine tenths of what the device has free.
        micro_batch_size: Samples in a micro-batch, in place of `memory`.
        micro_batch_tokens: Tokens in a micro-batch after padding, at most, in place of `memory`.
        cost: What a micro-batch costs, if the default does not fit the machine.
        collate: From a list of samples to a micro-batch. Either this or `pad`.
        pad: Padding values by leaf, ``{"input_ids": 0, "labels": -100}``, or a tokenizer.
        length: Length of a sample in tokens; by default that of its ``input_ids``.
        weigh: Weight of a sample in each term of the loss, ``{"ce": 12, "aux": 1}``; needed for
            a loss of several terms with different weights. Samples that are read when their
            micro-batch comes up are read once more for it.
        device: Where micro-batches are moved to; by default where the model is.
        verify: ``"first"`` looks at a few samples of the first effective batch and warns where
            samples interact, which calls `loss` up to 8 times more; ``"never"`` does not. Your
            own loop (`Accumulator.over`) is not looked at.
        nonfinite: What a gradient that is not finite does: ``"raise"``, or ``"skip_step"``.

    Returns:
        The accumulator.

    Raises:
        ArgumentError: Arguments contradict each other, or the model.
    """
    optimizers = _all_of(optimizer, Optimizer, call="accumulator(model, optimizer)")
    schedulers = _all_of(scheduler or (), LRScheduler, call="accumulator(scheduler=...)")
    _check_model(model)
    _check_optimizers(model, optimizers)
    _check_schedulers(schedulers, optimizers)
    _one_of("verify", verify, ("first", "never"))
    _one_of("nonfinite", nonfinite, ("raise", "skip_step"))
    if collate is not None and pad is not None:
        raise ArgumentError(
            "accumulator(collate=..., pad=...)",
            expected="one of the two",
            got="both",
            remedy="Let the collate function pad, and leave pad out.",
        )
    where = _device(device, model)
    sizing = _sizing(
        size=micro_batch_size, tokens=micro_batch_tokens, memory=memory, cost=cost, device=where
    )
    if sizing is None and loss is not None:
        free = usable_bytes(where, held=held_bytes(model, optimizers))
        sizing = UnderBudget(budget=Budget(bytes=free), cost=cost or Cost())
    if loss is None:
        _refuse_unused(
            memory=memory,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            collate=collate,
            pad=pad,
            length=length,
            device=device,
        )
    own = collate_function(pad) if collate is None else None
    checked = micro_batch_size is None or length is not None
    feed = Feed(
        collate=own or collate or collate_function(),
        length=length or default_length,
        padded=tuple(own.pad if own else ("input_ids",)) if checked else (),
        device=where,
    )
    check = None
    if loss is not None and verify == "first":
        check = Verify(model=model, loss=loss, micro_batch=feed.peek, length=feed.length)
    return Accumulator(
        model=model,
        update=Update(optimizers=optimizers, max_grad_norm=max_grad_norm),
        loss=loss,
        feed=feed,
        sizing=sizing,
        schedulers=schedulers,
        weigh=weigh,
        check=check,
        nonfinite=nonfinite,
    )


def effective_batches(
    dataset: Iterable[Any],
    size: int,
    *,
    lengths: Sequence[int] | np.ndarray | None = None,
    shuffle: bool = True,
    seed: int = 0,
    last: Last = "keep",
    epochs: int | None = None,
    steps: int | None = None,
    workers: int = 0,
) -> EffectiveBatches:
    """Build the effective batches of a dataset: which samples make an optimizer step.

    Args:
        dataset: Anything with ``len`` and indexing, or any iterable of samples.
        size: Samples in an effective batch.
        lengths: ``(n,)`` tokens of each sample, if known beforehand; samples are then read when
            their micro-batch comes up.
        shuffle: Whether samples are shuffled (not those of an iterable).
        seed: Seed of the order; the order of an epoch depends on it and the epoch alone.
        last: ``"keep"`` or ``"drop"`` the last, partial effective batch of an epoch.
        epochs: Epochs in one iteration; 1 if neither this nor `steps` is given.
        steps: Optimizer steps in one iteration, in place of `epochs`.
        workers: Processes that read samples ahead.

    Returns:
        An iterable of effective batches.
    """
    return EffectiveBatches(
        dataset=dataset,
        size=size,
        lengths=lengths,
        shuffle=shuffle,
        seed=seed,
        last=last,
        epochs=epochs,
        steps=steps,
        workers=workers,
    )


def _sizing(
    *,
    size: int | None,
    tokens: int | None,
    memory: Budget | int | str | None,
    cost: Cost | None,
    device: torch.device,
) -> Sizing | None:
    """Return how micro-batches are sized; None for what the device has free."""
    given = {"memory": memory, "micro_batch_size": size, "micro_batch_tokens": tokens}
    told = {name: value for name, value in given.items() if value is not None}
    if len(told) > 1:
        raise ArgumentError(
            f"accumulator({', '.join(f'{name}={value!r}' for name, value in told.items())})",
            expected=f"one of {' and '.join(told)}",
            got="both" if len(told) == 2 else "all three",
            remedy="Give memory alone: micro-batches are then as large as fits.",
        )
    if size is not None:
        if cost is not None:
            raise ArgumentError(
                "accumulator(cost=...)",
                expected="memory or micro_batch_tokens beside it",
                got="micro_batch_size, which leaves nothing to choose",
                remedy="Leave micro_batch_size out, or cost.",
            )
        return Told(FixedCut(size=size))
    if tokens is not None:
        cap = Cap(limit=require_positive("micro_batch_tokens", tokens))
        return Told(CappedCut(cap=cap, cost=cost or Cost()))
    if memory is None:
        return None
    budget = Budget.of(memory)
    require_within(budget, device, call=f"memory={memory!r}")
    return UnderBudget(budget=budget, cost=cost or Cost())


def _refuse_unused(**given: object) -> None:
    """Refuse arguments that only an accumulator which cuts effective batches uses."""
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"accumulator({name}=...)",
                expected="a loss function beside it",
                got="none, so that the micro-batches are your own loop's",
                remedy=f"Pass loss and call step(batch), or leave {name} out.",
            )


def _device(device: torch.device | str | None, model: nn.Module) -> torch.device:
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


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(
            f"accumulator({name}={value!r})",
            expected=" or ".join(map(repr, allowed)),
            got=repr(value),
            remedy=f"Pass {name}={allowed[0]!r}, the default.",
        )


def _all_of(given: Any, kind: type[T], *, call: str) -> tuple[T, ...]:
    """Return one or several things as a tuple; refuse what is of another kind."""
    several = given if isinstance(given, Sequence) else (given,)
    for one in several:
        if not isinstance(one, kind):
            raise ArgumentError(
                call,
                expected=f"one torch {kind.__name__}, or a sequence of them",
                got=type(one).__name__,
                remedy="Pass for example torch.optim.AdamW(model.parameters(), fused=True)."
                if kind is Optimizer
                else "Pass one of torch.optim.lr_scheduler, built on the optimizer.",
            )
    return tuple(several)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            "accumulator(model, optimizer)",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            remedy="Put several modules together: torch.nn.ModuleList([model, other]).",
        )


def _check_schedulers(schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", optimizers[0]) not in optimizers:
            raise ArgumentError(
                f"accumulator(scheduler={type(scheduler).__name__})",
                expected="a scheduler of the optimizer that is passed beside it",
                got="one that was built on another optimizer",
                remedy="Build the scheduler on this optimizer.",
            )


def _check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
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
