"""Before the first step, or before there is a device: what fits into a budget, and what it costs.

Everything here is predicted on fake tensors. Time is counted in floating-point operations, those of
recomputation included, and in the fixed cost of a micro-batch; it is told relative to the fastest
plan, or in seconds where a device was timed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from gradaccum.batch import EffectiveBatch, WeighFunction, effective_batch, weigh
from gradaccum.errors import SampleTooLargeError
from gradaccum.fake_trial import FakeTrial, Work
from gradaccum.feed import Feed
from gradaccum.levers import Levers, reached_for, repeated_blocks
from gradaccum.memory import Budget, Needs, Peaks
from gradaccum.partition import Cap, Cost, fixed, optimal
from gradaccum.protocols import LossFunction
from gradaccum.sizing import measured, require_least
from gradaccum.units import binary

_STEPS = 9  # points of each curve
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
        longest: Length of the longest sample that will come; 1 where samples have no lengths.
        weigh: Weight of a sample, by term of the loss, where there are several.
        parking: Whether the device has a host to park tensors on.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss: LossFunction
    feed: Feed
    batches: Sequence[EffectiveBatch]
    longest: int
    chunked_loss: LossFunction | None = None
    weigh: WeighFunction | None = None
    parking: bool = False

    def levers(self) -> list[Levers]:
        """Return what may be pulled: nothing, then ever more, in the order in which it is."""
        return reached_for(
            chunked_loss=self.chunked_loss is not None,
            blocks=bool(repeated_blocks(self.model)),
            host=self.parking,
        )

    def trial(self, levers: Levers, *, sample: Any = None) -> FakeTrial:
        """Return a trial on fake tensors, of the first effective batch or of the longest sample."""
        chunked = self.chunked_loss if levers.chunked_loss else None
        alone = replace(self.feed, length=lambda _: self.longest)
        effective = self.batches[0] if sample is None else effective_batch([sample])
        return FakeTrial(
            model=self.model,
            optimizers=self.optimizers,
            loss=chunked or self.loss,
            feed=self.feed if sample is None else alone,
            effective=effective,
            levers=levers,
            weighed=None if self.weigh is None else weigh(effective, self.weigh),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One way to make an optimizer step.

    Args:
        levers: What is pulled.
        limit: Bytes that its micro-batches were cut under.
        peak: Bytes of its largest micro-batch, all included.
        micro_batches: Accumulation steps, on average.
        largest: Samples of its largest micro-batch, and what they are padded to.
        real_share: Share of the computed positions that are no padding.
        time: Of an optimizer step: in seconds, or relative to the fastest.
    """

    levers: Levers
    limit: float
    peak: float
    micro_batches: float
    largest: tuple[int, int]
    real_share: float
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What some levers need and cost.

    Args:
        levers: What is pulled.
        peaks: Of any micro-batch.
        flops: ``(2,)`` floating-point operations for a position, and for a squared one.
    """

    levers: Levers
    peaks: Peaks
    flops: np.ndarray

    def work(self, count: int, length: int) -> float:
        """Return the floating-point operations of a micro-batch."""
        return float(self.flops @ (count * length, count * length**2))


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
        """Return the curve of some levers."""
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
    needs, curves = None, []
    for one in subject.levers():
        trial = subject.trial(one)
        needs = needs or trial.needs()
        require_least(needs, budget)
        with trial.opened():
            first = subject.batches[0]
            peaks = measured(len(first), first.lengths(subject.feed.length), trial, needs)
        curves.append(Curve(levers=one, peaks=peaks, flops=_flops(trial.work)))
    base = curves[0].flops[0]  # one token's work, by which the fixed cost of a micro-batch is told
    rates = [1.0] * len(curves) if clock is None else clock([curve.levers for curve in curves])
    every = [_lengths(batch, subject.feed) for batch in subject.batches]
    cost = cost or Cost()
    points = [
        _point(curve, limit, every, cost, base, rate)
        for curve, rate in zip(curves, rates, strict=True)
        for limit in _limits(curve.peaks, every, subject.longest, budget, cost)
    ]
    if clock is None and points:
        fastest = min(point.time for point in points)
        points = [replace(point, time=point.time / fastest) for point in points]
    points = [  # a higher limit may change nothing
        point
        for k, point in enumerate(points)
        if k == 0 or (point.levers, point.peak) != (points[k - 1].levers, points[k - 1].peak)
    ]
    fitting = [point for point in points if point.limit <= budget.bytes]
    alone = {str(curve.levers): curve.peaks(1, subject.longest) for curve in curves}
    if needs is None or not fitting:
        raise SampleTooLargeError(f"memory={binary(budget.bytes)!r}", **_no_room(alone, subject))
    order = [curve.levers for curve in curves]  # as few as let one sample fit, as training does
    chosen = min(fitting, key=lambda point: (order.index(point.levers), point.time, point.peak))
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
    alone: dict[str, float] = {}
    for levers in subject.levers():
        trial = subject.trial(levers, sample=sample)
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
    return {
        "expected": f"room for {sample} alone",
        "got": f"a predicted peak of {told.replace('with none', 'without levers')}",
        "remedy": f"Truncate samples, or raise memory to {binary(1.03 * min(alone.values()))}.",
    }


def _lengths(batch: EffectiveBatch, feed: Feed) -> np.ndarray:
    found = batch.lengths(feed.length)
    return np.ones(len(batch), dtype=np.int64) if found is None else found


def _flops(work: Sequence[Work]) -> np.ndarray:
    """Fit floating-point operations to positions and squared positions."""
    terms = np.array([(w.count * w.length, w.count * w.length**2) for w in work], dtype=float)
    scale = terms.max(axis=0)
    solved, *_ = np.linalg.lstsq(
        terms / scale, np.array([w.flops for w in work], float), rcond=None
    )
    return np.asarray(np.maximum(solved, 0) / scale)


def _limits(
    peaks: Peaks, every: Sequence[np.ndarray], longest: int, budget: Budget, cost: Cost
) -> list[float]:
    """Return bytes, from what one sample needs to what micro-batches need that nothing bounds."""
    least = peaks(1, longest)
    free = Cap(limit=1e30, size=peaks, unit="bytes")
    most = max(least, *(peaks(*shape) for lengths in every for shape in _cut(lengths, free, cost)))
    found = {float(limit) for limit in np.geomspace(least, most, _STEPS)}
    if least <= budget.bytes < most:
        found.add(float(budget.bytes))
    return sorted(found)


def _cut(lengths: np.ndarray, cap: Cap, cost: Cost) -> list[tuple[int, int]]:
    """Cut an effective batch; return the samples and the length of each micro-batch."""
    if int(lengths.max()) > 1:
        cut = optimal(lengths, cap, cost=cost)
    else:
        cut = fixed(len(lengths), cap.most(1, len(lengths)))
    return [(len(positions), int(lengths[positions].max())) for positions in cut]


def _point(
    curve: Curve,
    limit: float,
    every: Sequence[np.ndarray],
    cost: Cost,
    base: float,
    rate: float,
) -> Point:
    """Cut some effective batches under a limit, and add up what they need and cost."""
    cap = Cap(limit=limit * (1 + 1e-9), size=curve.peaks, unit="bytes")
    shapes = [shape for lengths in every for shape in _cut(lengths, cap, cost)]
    work = sum(cost.fixed * base + curve.work(count, length) for count, length in shapes)
    real = sum(int(lengths.sum()) for lengths in every)
    return Point(
        levers=curve.levers,
        limit=limit,
        peak=max(curve.peaks.predicted(*shape) for shape in shapes),
        micro_batches=len(shapes) / len(every),
        largest=max(shapes, key=lambda shape: curve.peaks.predicted(*shape)),
        real_share=real / sum(count * length for count, length in shapes),
        time=float(rate * work / len(every)),
    )


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
