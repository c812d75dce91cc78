"""The frontier: the time of an optimizer step against its peak memory, for each of the levers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradaccum.fake_trial import Work
from gradaccum.levers import Levers
from gradaccum.memory import Budget, Peaks
from gradaccum.partition import Cap, Cost, fixed, optimal

_STEPS = 9  # points of each curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One way to make an optimizer step.

    Args:
        levers: What is pulled.
        sums: Dtype of the gradient sums of parameters that are narrower than 32 bits.
        limit: Bytes that its micro-batches were cut under.
        peak: Bytes of its largest micro-batch, all included.
        micro_batches: Accumulation steps, on average.
        largest: Samples of its largest micro-batch, and what they are padded to.
        real_share: Share of the computed positions that are no padding.
        time: Of an optimizer step: in seconds, or relative to the fastest.
    """

    levers: Levers
    sums: str
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
        sums: Dtype of the gradient sums of parameters that are narrower than 32 bits.
        peaks: Of any micro-batch.
        flops: ``(2,)`` floating-point operations for a position, and for a squared one.
        rate: Time of one of them.
    """

    levers: Levers
    sums: str
    peaks: Peaks
    flops: np.ndarray
    rate: float = 1.0

    def work(self, count: int, length: int) -> float:
        """Return the floating-point operations of a micro-batch."""
        return float(self.flops @ (count * length, count * length**2))


def frontier(
    curves: Sequence[Curve],
    every: Sequence[np.ndarray],
    *,
    longest: int,
    budget: Budget,
    cost: Cost,
) -> list[Point]:
    """Cut effective batches under limits from what one sample needs to what nothing bounds.

    Args:
        curves: By levers; by the first, the fixed cost of a micro-batch is told in tokens.
        every: ``(n,)`` lengths of some effective batches; ones where samples have none.
        longest: Length of the longest sample that will come.
        budget: Is among the limits.
        cost: Of a micro-batch.

    Returns:
        Points, from little memory to much for each of the levers; none that changes nothing.
    """
    base = curves[0].flops[0]
    found: list[Point] = []
    for curve in curves:
        for limit in _limits(curve.peaks, every, longest, budget, cost):
            point = _point(curve, limit, every, cost, base)
            if not found or _identity(point) != _identity(found[-1]):
                found.append(point)
    return found


def fitted_flops(work: Sequence[Work]) -> np.ndarray:
    """Fit floating-point operations to positions and squared positions.

    Args:
        work: Of some micro-batches.

    Returns:
        ``(2,)`` coefficients, at least 0.
    """
    terms = np.array([(w.count * w.length, w.count * w.length**2) for w in work], dtype=float)
    scale = terms.max(axis=0)
    solved, *_ = np.linalg.lstsq(
        terms / scale, np.array([w.flops for w in work], float), rcond=None
    )
    return np.asarray(np.maximum(solved, 0) / scale)


def _identity(point: Point) -> tuple[Levers, str, float]:
    return point.levers, point.sums, point.peak


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
) -> Point:
    """Cut some effective batches under a limit, and add up what they need and cost."""
    cap = Cap(limit=limit * (1 + 1e-9), size=curve.peaks, unit="bytes")
    shapes = [shape for lengths in every for shape in _cut(lengths, cap, cost)]
    work = sum(cost.fixed * base + curve.work(count, length) for count, length in shapes)
    real = sum(int(lengths.sum()) for lengths in every)
    return Point(
        levers=curve.levers,
        sums=curve.sums,
        limit=limit,
        peak=max(curve.peaks.predicted(*shape) for shape in shapes),
        micro_batches=len(shapes) / len(every),
        largest=max(shapes, key=lambda shape: curve.peaks.predicted(*shape)),
        real_share=real / sum(count * length for count, length in shapes),
        time=float(curve.rate * work / len(every)),
    )
