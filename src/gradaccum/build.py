"""From what you have to the parts: the lower-case functions of the public face."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from gradaccum.accumulator import Accumulator
from gradaccum.arguments import (
    all_of,
    check_lockstep,
    check_masters,
    check_model,
    check_optimizers,
    check_precision,
    check_schedulers,
    device_of,
    refuse_unused,
)
from gradaccum.audit import Verify
from gradaccum.batch import LengthFunction, WeighFunction, default_length
from gradaccum.choices import require_one_of
from gradaccum.collate import CollateFunction, collate_function
from gradaccum.coupled import Lockstep, is_exact
from gradaccum.dataset import Last
from gradaccum.distributed import sync_of
from gradaccum.dtypes import Masters
from gradaccum.ema import EMA
from gradaccum.engine import Nonfinite
from gradaccum.errors import ArgumentError
from gradaccum.feed import Feed
from gradaccum.loader import EffectiveBatches
from gradaccum.memory import Budget, held_bytes, require_within, usable_bytes
from gradaccum.partition import Cap, CappedCut, Cost, FixedCut, require_positive
from gradaccum.protocols import InTurn, LossFunction
from gradaccum.sizes import LrRule, Size, SizeBy
from gradaccum.sizing import Sizing, Told, UnderBudget
from gradaccum.update import Update

Verified = Literal["first", "never"]


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
    verify: Verified = "first",
    nonfinite: Nonfinite = "raise",
    scaler: GradScaler | None = None,
    sum_dtype: torch.dtype = torch.float32,
    master_weights: bool = False,
    stochastic_rounding: bool = False,
    ema: AveragedModel | Sequence[AveragedModel] | None = None,
    lockstep: bool | None = None,
) -> Accumulator:
    """Build an accumulator.

    Args:
        model: The model; `loss` is called with it. Wrapped in DistributedDataParallel (or holding
            models that are), its ranks share each effective batch; see "Several ranks" in
            docs/combinations.md.
        optimizer: Any optimizer of torch's but LBFGS, or several that step together. One with
            ``fused=True`` scales gradients in its own pass: its step hooks see the sums.
        loss: ``loss(model, micro_batch)`` returning a `Loss`, the sum over the micro-batch and
            its weight, or a mapping of names to them. Without it, drive your own loop with
            `Accumulator.over` and `Accumulator.backward`.
        scheduler: Any learning-rate scheduler, or several; moved once per update.
        max_grad_norm: Bound on the 2-norm of the gradient of the effective batch. A parameter
            group with an entry ``"max_grad_norm"`` is clipped by itself.
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
        nonfinite: What a loss or gradient that is not finite does. ``"raise"`` raises an error
            that says where it came from; ``"skip_step"`` moves nothing; ``"drop_micro_batch"``
            leaves micro-batches whose loss is not finite out, with their weights, which waits for
            the device in each.
        scaler: A `torch.amp.GradScaler`, where `loss` runs under ``torch.autocast`` of float16. It
            is driven once per effective batch: leave its methods alone.
        sum_dtype: The least of gradient sums; those of wider parameters are as wide as they are.
            Parameters of 16 bits need ``torch.float32`` to lose nothing that is added.
        master_weights: Whether parameters of 16 bits are updated by float32 copies, so that small
            updates are not lost: 4 bytes a parameter more, and optimizer state in float32. Build
            the accumulator before ``optimizer.load_state_dict``.
        stochastic_rounding: Whether parameters of bfloat16 are updated in float32 and rounded up or
            down at random, in place of copies that are kept.
        ema: `gradaccum.EMA`, torch's `AveragedModel` of `model`, or several; moved once per update.
        lockstep: Whether the micro-batches of a step run side by side and may meet, as exact
            BatchNorm and the functions of `gradaccum.coupled` need it; by default where `model` has
            exact BatchNorm. Takes `micro_batch_size` or `micro_batch_tokens`.

    Returns:
        The accumulator.

    Raises:
        ArgumentError: Arguments contradict each other, or the model.
    """
    optimizers = all_of(optimizer, Optimizer, call="accumulator(model, optimizer)")
    schedulers = all_of(scheduler or (), LRScheduler, call="accumulator(scheduler=...)")
    averages = all_of(ema or (), AveragedModel, call="accumulator(ema=...)")
    check_model(model)
    check_optimizers(model, optimizers)
    check_schedulers(schedulers, optimizers)
    require_one_of("verify", verify, get_args(Verified), call="accumulator")
    require_one_of("nonfinite", nonfinite, get_args(Nonfinite), call="accumulator")
    check_precision(scaler, sum_dtype)
    check_masters(master_weights, stochastic_rounding, sum_dtype)
    if nonfinite == "drop_micro_batch" and weigh is not None:
        raise ArgumentError(
            'accumulator(nonfinite="drop_micro_batch", weigh=...)',
            expected="a loss of one term, whose sum is divided when all micro-batches are in",
            got="weights beforehand, by which some gradients are divided already",
            remedy='Pass nonfinite="skip_step".',
        )
    if collate is not None and pad is not None:
        raise ArgumentError(
            "accumulator(collate=..., pad=...)",
            expected="one of the two",
            got="both",
            remedy="Let the collate function pad, and leave pad out.",
        )
    sync = sync_of(model)
    if scaler is not None and scaler.is_enabled() and sync.ranks > 1:
        raise ArgumentError(
            "accumulator(scaler=...)",
            expected="one process",
            got=f"{sync.ranks} ranks, whose losses would be scaled differently",
            remedy="Use torch.autocast with torch.bfloat16, which needs no scaler.",
        )
    where = device_of(device, model)
    told = {
        "memory": memory,
        "micro_batch_size": micro_batch_size,
        "micro_batch_tokens": micro_batch_tokens,
    }
    coupled = is_exact(model) if lockstep is None else lockstep
    if coupled:
        check_lockstep(nonfinite=nonfinite, ranks=sync.ranks, told=told, has_loss=loss is not None)
    sizing = _told_sizing(told, cost, where)
    if sizing is None and loss is not None:
        free = usable_bytes(where, held=held_bytes(model, optimizers, averages))
        sizing = UnderBudget(budget=Budget(bytes=free), cost=cost or Cost())
    if loss is None:
        refuse_unused(**told, collate=collate, pad=pad, length=length, device=device)
    own = collate_function(pad) if collate is None else None
    checked = micro_batch_size is None or length is not None
    feed = Feed(
        collate=own or collate or collate_function(),
        length=length or default_length,
        padded=tuple(own.pad if own else ("input_ids",)) if checked else (),
        device=where,
    )
    check = None
    if loss is not None and verify == "first" and not coupled:
        check = Verify(model=model, loss=loss, micro_batch=feed.peek, length=feed.length)
    return Accumulator(
        model=model,
        update=Update(optimizers=optimizers, max_grad_norm=max_grad_norm),
        loss=loss,
        feed=feed,
        sizing=sizing,
        schedulers=schedulers,
        weigh=weigh,
        sync=sync,
        runner=Lockstep() if coupled else InTurn(),
        check=check,
        nonfinite=nonfinite,
        averages=[(one, one.source if isinstance(one, EMA) else model) for one in averages],
        scaler=scaler,
        sum_dtype=sum_dtype,
        masters=Masters.of(master_weights, stochastic_rounding),
    )


def effective_batches(
    dataset: Iterable[Any],
    size: Size,
    *,
    size_by: SizeBy = "steps",
    lr_rule: LrRule = "none",
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
        size: Samples in an effective batch: a number; a mapping such as ``{0: 64, 1000: 256}``; or
            a pure function of the `Progress` (``steps``, ``samples``, ``tokens``), which is asked
            at the start of each effective batch, and beforehand.
        size_by: What the keys of a mapping count, from the beginning of training: ``"steps"``,
            ``"samples"`` or, with `lengths`, ``"tokens"`` that were handed out.
        lr_rule: How the learning rate follows the size: ``"none"``, ``"linear"`` or ``"sqrt"`` of
            its ratio to the first size. ``accumulator.step(batch)`` multiplies the learning rate of
            the optimizer's groups by ``batch.lr_scale`` for that step only; schedulers know nothing
            of it.
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
        size_by=size_by,
        lr_rule=lr_rule,
        lengths=lengths,
        shuffle=shuffle,
        seed=seed,
        last=last,
        epochs=epochs,
        steps=steps,
        workers=workers,
    )


def _told_sizing(told: Mapping[str, Any], cost: Cost | None, device: torch.device) -> Sizing | None:
    """Return how micro-batches are sized, as the user says; None for what the device has free."""
    given = {name: value for name, value in told.items() if value is not None}
    if len(given) > 1:
        raise ArgumentError(
            f"accumulator({', '.join(f'{name}={value!r}' for name, value in given.items())})",
            expected=f"one of {' and '.join(given)}",
            got="both" if len(given) == 2 else "all three",
            remedy="Give memory alone: micro-batches are then as large as fits.",
        )
    memory, size, tokens = told["memory"], told["micro_batch_size"], told["micro_batch_tokens"]
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
