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
from gradaccum.partition import Cap, CappedCut, Cost, Cut, FixedCut, require_positive
from gradaccum.protocols import LossFunction
from gradaccum.update import Update

T = TypeVar("T")


def accumulator(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loss: LossFunction | None = None,
    *,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_grad_norm: float | None = None,
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
        micro_batch_size: Samples in a micro-batch. Either this or `micro_batch_tokens`.
        micro_batch_tokens: Tokens in a micro-batch after padding, at most.
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
    cut = _cut(micro_batch_size, micro_batch_tokens, cost)
    if cut is None:
        _refuse_unused(collate=collate, pad=pad, length=length, device=device)
    feed = None
    if cut is not None:
        own = collate_function(pad) if collate is None else None
        capped = length is not None or micro_batch_tokens is not None
        feed = Feed(
            cut=cut,
            collate=own or collate or collate_function(),
            length=length or default_length,
            padded=tuple(own.pad if own else ("input_ids",)) if capped else (),
            device=_device(device, model),
        )
    check = None
    if feed is not None and loss is not None and verify == "first":
        check = Verify(model=model, loss=loss, micro_batch=feed.peek, length=feed.length)
    return Accumulator(
        model=model,
        update=Update(optimizers=optimizers, max_grad_norm=max_grad_norm),
        loss=loss,
        feed=feed,
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


def _cut(size: int | None, tokens: int | None, cost: Cost | None) -> Cut | None:
    if size is not None and tokens is not None:
        raise ArgumentError(
            f"accumulator(micro_batch_size={size}, micro_batch_tokens={tokens})",
            expected="one of the two",
            got="both",
            remedy="Give micro_batch_tokens for samples of uneven length, else the size.",
        )
    if tokens is not None:
        cap = Cap(limit=require_positive("micro_batch_tokens", tokens))
        return CappedCut(cap=cap, cost=cost or Cost())
    if cost is not None:
        raise ArgumentError(
            "accumulator(cost=...)",
            expected="micro_batch_tokens beside it",
            got="no cap that a choice could be made under",
            remedy="Pass micro_batch_tokens, or leave cost out.",
        )
    return None if size is None else FixedCut(size=size)


def _refuse_unused(**given: object) -> None:
    """Refuse arguments that only an accumulator which cuts effective batches uses."""
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"accumulator({name}=...)",
                expected="micro_batch_size or micro_batch_tokens beside it",
                got="neither, so that the micro-batches are your own loop's",
                remedy=f"Pass one of them and call step(batch), or leave {name} out.",
            )


def _device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    if device is None:
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(
            f"accumulator(device={device!r})",
            expected="the name of a device",
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
