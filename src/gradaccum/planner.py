"""Before the first step, or before there is a device: what fits into a budget, and what it costs.

Everything here is predicted on fake tensors. Time is counted in floating-point operations, those of
recomputation included, and in the fixed cost of a micro-batch; it is told relative to the fastest
plan, or in seconds where a device was timed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from gradaccum.batch import WeighFunction
from gradaccum.dtypes import Masters, sum_dtype_of
from gradaccum.errors import SampleTooLargeError
from gradaccum.fake_trial import FakeTrial
from gradaccum.feed import Feed
from gradaccum.frontier import Curve, Point, fitted_flops, frontier
from gradaccum.levers import Levers, reached_for, repeated_blocks
from gradaccum.memory import Budget, Needs
from gradaccum.partition import Cap, Cost
from gradaccum.prepared import Prepared
from gradaccum.probing import measured
from gradaccum.protocols import LossFunction
from gradaccum.sizing import require_least
from gradaccum.units import binary

_SAME = 1.02  # what differs by less is the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is planned for.

    Args:
        model: The model.
        optimizers: Hold parameters of it.
        loss: ``loss(model, micro_batch)``.
        chunked_loss: The same loss with a chunked head, if there is one.
        feed: Collates samples.
        batches: Some effective batches; samples of the first are probed.
        lengths: ``(n,)`` tokens of all samples that will come; None where they have none.
        weigh: Weight of a sample, by term of the loss, where there are several.
        parking: Whether the device has a host to park tensors on.
        sum_dtype: The least of gradient sums.
        masters: What parameters of fewer bits than that are updated by.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss: LossFunction
    feed: Feed
    batches: Sequence[Prepared]
    lengths: np.ndarray | None
    chunked_loss: LossFunction | None = None
    weigh: WeighFunction | None = None
    parking: bool = False
    sum_dtype: torch.dtype = torch.float32
    masters: Masters = Masters.NONE

    @property
    def longest(self) -> int:
        """Length of the longest sample that will come; 1 where they have none."""
        return 1 if self.lengths is None else int(self.lengths.max())

    def levers(self) -> list[Levers]:
        """Return what may be pulled: nothing, then ever more, in the order in which it is."""
        return reached_for(
            chunked_loss=self.chunked_loss is not None,
            blocks=bool(repeated_blocks(self.model)),
            host=self.parking,
        )

    def sum_dtypes(self) -> list[torch.dtype]:
        """Return what sums may be: what is asked for, then no wider than 16-bit parameters are."""
        trained = [p for o in self.optimizers for g in o.param_groups for p in g["params"]]
        narrow = {p.dtype for p in trained if sum_dtype_of(p, self.sum_dtype) != p.dtype}
        if self.masters is not Masters.NONE:  # they step with the sums as they are
            return [self.sum_dtype]
        return [self.sum_dtype, *sorted(narrow, key=str)[:1]]

    def trial(
        self,
        levers: Levers,
        prepared: Prepared | None = None,
        sum_dtype: torch.dtype | None = None,
    ) -> FakeTrial:
        """Return a trial on fake tensors, of the first effective batch or of another."""
        return FakeTrial(
            model=self.model,
            optimizers=self.optimizers,
            loss=self.loss,
            chunked_loss=self.chunked_loss,
            feed=self.feed,
            prepared=prepared or self.batches[0],
            levers=levers,
            sum_dtype=sum_dtype or self.sum_dtype,
            masters=self.masters,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What fits, and what is best.

    Args:
        budget: What was asked for.
        needs: What is held whatever the size of a micro-batch.
        curves: By levers.
        points: The frontier, from little memory to much, for each of the levers.
        chosen: The fastest that fits, with as few levers as let one sample fit.
        reason: Why, in one sentence.
        seconds: Whether times are seconds.
    """

    budget: Budget
    needs: Needs
    curves: tuple[Curve, ...]
    points: tuple[Point, ...]
    chosen: Point
    reason: str
    seconds: bool

    def curve(self, levers: Levers) -> Curve:
        """Return the curve of some levers, with sums as asked for."""
        return next(curve for curve in self.curves if curve.levers == levers)

    def caps(self, lengths: Iterable[int]) -> dict[int, int]:
        """Return how many samples of each length go into one micro-batch of the chosen plan."""
        cap = Cap(limit=self.budget.bytes, size=self.curve(self.chosen.levers).peaks)
        return {length: cap.most(length, 2**20) for length in lengths}


def plan(
    subject: Subject,
    budget: Budget,
    *,
    cost: Cost | None = None,
    clock: Callable[[Sequence[Levers]], Sequence[float]] | None = None,
) -> Plan:
    """Predict what fits into a budget and what it costs.

    Args:
        subject: What is planned for.
        budget: Bytes that a step may use.
        cost: Fixed cost of a micro-batch, in tokens.
        clock: Returns the seconds of a floating-point operation under each of some levers, where
            there is a device to time; else times are relative.

    Returns:
        The plan.

    Raises:
        SampleTooLargeError: One sample alone does not fit, whatever is pulled.
    """
    options, sums = subject.levers(), subject.sum_dtypes()
    trials = [(levers, d, subject.trial(levers, sum_dtype=d)) for d in sums for levers in options]
    needs = trials[0][2].needs()
    require_least(needs, budget)
    rates = [1.0] * len(options) if clock is None else clock(options)
    curves = [
        _curve(subject, levers, dtype, trial, rate)
        for (levers, dtype, trial), rate in zip(trials, [*rates] * len(sums), strict=True)
    ]
    asked = curves[0].sums
    every = [_lengths(batch) for batch in subject.batches]
    points = frontier(curves, every, longest=subject.longest, budget=budget, cost=cost or Cost())
    if clock is None:
        fastest = min(point.time for point in points)
        points = [replace(point, time=point.time / fastest) for point in points]
    fitting = [p for p in points if p.limit <= budget.bytes and p.sums == asked]
    alone = {str(c.levers): c.peaks(1, subject.longest) for c in curves if c.sums == asked}
    if not fitting:
        raise SampleTooLargeError(f"memory={binary(budget.bytes)!r}", **_no_room(alone, subject))
    # As few levers as let one sample fit, as training does.
    chosen = min(fitting, key=lambda point: (options.index(point.levers), point.time, point.peak))
    return Plan(
        budget=budget,
        needs=needs,
        curves=tuple(curves),
        points=tuple(points),
        chosen=chosen,
        reason=_reason(chosen, fitting, alone, subject.longest),
        seconds=clock is not None,
    )


def least_levers(subject: Subject, budget: Budget, sample: Any) -> Levers:
    """Return as few levers as let the longest sample fit alone.

    Args:
        subject: What is trained.
        budget: Bytes that a step may use.
        sample: The longest.

    Returns:
        The levers.

    Raises:
        SampleTooLargeError: It does not fit, whatever is pulled.
    """
    prepared = Prepared.of([sample], lambda _: subject.longest, subject.weigh)
    alone: dict[str, float] = {}
    for levers in subject.levers():
        trial = subject.trial(levers, prepared)
        needs = trial.needs()
        require_least(needs, budget)
        with trial.opened():
            needed = needs.rest + trial.probe(np.zeros(1, dtype=np.int64)).peak
        alone[str(levers)] = needed
        if needed * _SAME <= budget.bytes:
            return levers
    raise SampleTooLargeError(f"memory={binary(budget.bytes)!r}", **_no_room(alone, subject))


def _no_room(alone: dict[str, float], subject: Subject) -> dict[str, str]:
    """Return the parts of the message that one sample does not fit."""
    told = ", ".join(f"{binary(size)} with {name}" for name, size in alone.items())
    longest = subject.longest
    sample = f"the longest sample ({longest:,} tokens)" if longest > 1 else "one sample"
    less = "Truncate samples" if longest > 1 else "Take smaller samples"
    return {
        "expected": f"room for {sample} alone",
        "got": f"a predicted peak of {told.replace('with none', 'without levers')}",
        "remedy": f"{less}, or raise memory to {binary(1.03 * min(alone.values()))}.",
    }


def _curve(
    subject: Subject, levers: Levers, sums: torch.dtype, trial: FakeTrial, rate: float
) -> Curve:
    """Predict what some levers need and cost."""
    first = subject.batches[0]
    with trial.opened():
        peaks = measured(len(first.samples), first.lengths, trial)
    return Curve(
        levers=levers,
        sums=str(sums).removeprefix("torch."),
        peaks=peaks,
        flops=fitted_flops(trial.work),
        rate=rate,
    )


def _lengths(batch: Prepared) -> np.ndarray:
    found = batch.lengths
    return np.ones(len(batch.samples), dtype=np.int64) if found is None else found


def _reason(chosen: Point, fitting: Sequence[Point], alone: dict[str, float], longest: int) -> str:
    """Say why a point was chosen, and what would be faster than it."""
    if str(chosen.levers) == "none":
        why = "The fastest that fits; no lever is needed."
    else:
        why = (
            f"A sample of {longest:,} alone needs {binary(alone['none'])} without levers, and "
            f"{binary(alone[str(chosen.levers)])} with {chosen.levers}; this is the fastest so."
        )
    fastest = min(fitting, key=lambda point: point.time)
    if fastest.time * _SAME < chosen.time and fastest.levers != chosen.levers:
        share = fastest.time / chosen.time
        why += f" With {fastest.levers} it would take {share:.2f} times the time."
    return why
