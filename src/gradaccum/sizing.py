"""How large micro-batches may be: told, or found with a few small ones under a budget."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Protocol

import numpy as np

from gradaccum.errors import ArgumentError, GradaccumError, PredictionError
from gradaccum.memory import Budget, Needs, Peaks, Probe, at_most, fit
from gradaccum.partition import Cap, CappedCut, Cost, Cut, FixedCut
from gradaccum.units import binary

# Of what the budget leaves for activations: most in a small probe of several samples, which tells
# what bytes grow with, and in a large one, which checks it.
_SMALL, _LARGE = 0.8, 0.5
_MOST_SAMPLES = 2**20  # in a micro-batch, whatever the memory


class Trial(Protocol):
    """Runs micro-batches whose gradients are thrown away."""

    def opened(self) -> AbstractContextManager[None]:
        """Return a context in which `probe` may be called."""

    def needs(self) -> Needs:
        """Return what is held whatever the size of a micro-batch."""

    def probe(self, positions: np.ndarray, budget: Budget | None = None) -> Probe | None:
        """Return what a micro-batch of the samples at these positions needs.

        Args:
            positions: In the effective batch.
            budget: It is stopped where it needs more.

        Returns:
            None if the budget or the device has not enough memory for it.
        """


class Sizing(Protocol):
    """A way to find the size of micro-batches, asked before the first."""

    @property
    def measures(self) -> bool:
        """Whether it depends on the samples that it was found with."""

    def __call__(self, num_samples: int, lengths: np.ndarray | None, trial: Trial) -> Cut:
        """Return how effective batches are to be cut.

        Args:
            num_samples: Of the first effective batch.
            lengths: ``(n,)`` tokens of its samples; None where they have none.
            trial: Runs some of them.
        """


@dataclass(frozen=True, slots=True)
class Told:
    """The user said how to cut.

    Args:
        cut: How.
    """

    cut: Cut
    measures: ClassVar[bool] = False

    def __call__(self, num_samples: int, lengths: np.ndarray | None, trial: Trial) -> Cut:
        """Return it."""
        return self.cut


@dataclass(frozen=True, kw_only=True, slots=True)
class UnderBudget:
    """The budget says: the cheapest micro-batches that fit into it.

    Args:
        budget: Bytes that a step may use.
        cost: What a micro-batch costs in time.
    """

    budget: Budget
    cost: Cost = field(default_factory=Cost)
    measures: ClassVar[bool] = True

    def __call__(self, num_samples: int, lengths: np.ndarray | None, trial: Trial) -> Cut:
        """Probe, fit, and return the cut.

        Args:
            num_samples: Of the first effective batch.
            lengths: ``(n,)`` tokens of its samples; None where they have none.
            trial: Runs some of them.

        Returns:
            The cut.
        """
        needs = trial.needs()
        budget = self.budget
        require_least(needs, budget)
        with trial.opened():
            peaks = measured(num_samples, lengths, trial, needs, limit=budget.bytes)
        cap = Cap(limit=budget.bytes, size=peaks, unit="bytes")
        if lengths is not None:
            return CappedCut(cap=cap, cost=self.cost)
        CappedCut(cap=cap).admit(np.ones(1, dtype=np.int64))
        return FixedCut(size=cap.most(1, _MOST_SAMPLES))


def require_least(needs: Needs, budget: Budget) -> None:
    """Refuse a budget that no micro-batch can keep to.

    Args:
        needs: What is held whatever the size of a micro-batch.
        budget: Bytes that a step may use.

    Raises:
        ArgumentError: Parameters, gradients and optimizer alone exceed the budget.
    """
    if needs.least > budget.bytes:
        raise ArgumentError(
            f"memory={binary(budget.bytes)!r}",
            expected=f"at least {binary(needs.least)} for what a step holds whatever its size",
            got=", ".join(f"{part} {binary(size)}" for part, size in needs.parts().items()),
            remedy="Raise memory, train fewer parameters, or use an optimizer with less state.",
        )


def measured(
    num_samples: int,
    lengths: np.ndarray | None,
    trial: Trial,
    needs: Needs,
    *,
    limit: float = inf,
) -> Peaks:
    """Probe from the smallest micro-batch up, each only if those before say that it fits.

    Args:
        num_samples: Of an effective batch.
        lengths: ``(n,)`` tokens of its samples; None where they have none.
        trial: Runs some of them; must be open.
        needs: What is held whatever the size of a micro-batch.
        limit: Bytes that may be used. Without one, shapes are chosen for the fit alone.

    Returns:
        The peak of any micro-batch.

    Raises:
        ArgumentError: The device has not enough memory for the smallest sample.
    """
    told = np.ones(num_samples, dtype=np.int64) if lengths is None else np.maximum(lengths, 1)
    order = np.argsort(told, kind="stable")
    ascending = told[order]
    free = limit - needs.rest
    budget = None if limit == inf else Budget(bytes=int(limit))
    probes: list[Probe] = []
    tried: set[tuple[int, int]] = set()
    failed: list[tuple[int, int]] = []

    def fitted() -> Peaks:
        return fit(probes, rest=needs.rest, update=needs.least)

    def probe(positions: np.ndarray, fits: Callable[[int, int], bool]) -> None:
        count, length = len(positions), int(told[positions].max())
        smaller_failed = any(n <= count and size <= length for n, size in failed)
        if (count, length) in tried or smaller_failed or not fits(count, length):
            return
        tried.add((count, length))
        if (found := trial.probe(positions, budget if probes else None)) is None:
            failed.append((count, length))
        else:
            probes.append(found)

    # Of one probe nothing is known of what its bytes grow with; the second is tried whatever.
    def fits_alone(_: int, length: int) -> bool:
        alone = [found for found in probes if found.count == 1]
        return len(alone) < 2 or fitted().predicted(1, length) <= limit

    def fits_together(count: int, length: int) -> bool:
        several = [found for found in probes if found.count > 1]
        return len(several) < 2 or at_most(probes)(count, length) <= _SMALL * free

    lone = True
    try:
        probe(order[:1], lambda *_: True)
    except Exception as error:  # one sample may be too few, as for BatchNorm's statistics
        refused = isinstance(error, GradaccumError) and not isinstance(error, PredictionError)
        if refused or num_samples == 1:
            raise
        lone = False
        probe(order[:2], lambda *_: True)
    if not probes:
        raise ArgumentError(
            f"memory={binary(limit)!r}",
            expected="a device with room for one sample",
            got=f"out of memory for the smallest of the effective batch ({ascending[0]:,} tokens)"
            if lengths is not None
            else "out of memory for one sample",
            remedy="Free memory on the device, or take smaller samples or a smaller model.",
        )
    for positions in _alone(order, ascending) if lone else ():
        probe(positions, fits_alone)
    for positions in _shapes(order, ascending):
        probe(positions, fits_together)
    if limit == inf:
        return fitted()
    cap = Cap(limit=_LARGE * free, size=at_most(probes))
    for last in (num_samples - 1, num_samples // 2):  # of the longest samples that fit
        most = min(last + 1, max(2, num_samples // 4))  # a quarter of the step's time, at most
        if (count := cap.most(int(ascending[last]), most)) > 1:
            probe(order[last - count + 1 : last + 1], lambda *_: True)
            break
    return fitted()


def _shapes(order: np.ndarray, ascending: np.ndarray) -> Iterator[np.ndarray]:
    """Yield positions of small micro-batches, of shapes that tell the terms of the fit apart."""
    for count, factor in ((2, 1), (4, 1), (2, 3), (4, 5)):
        # the first sample that is so many times as long as the shortest ones, or the longest
        last = int(np.searchsorted(ascending[:-1], factor * ascending[min(1, len(order) - 1)]))
        last = max(last, count - 1)
        if last < len(order):
            # With the shortest sample, so that padding, and a mask where it needs one, are there.
            yield np.r_[order[:1], order[last - count + 2 : last + 1]]


def _alone(order: np.ndarray, ascending: np.ndarray) -> Iterator[np.ndarray]:
    """Yield single samples: about 2 and 4 times as long as the shortest, and the longest."""
    for least in (2 * ascending[0], 4 * ascending[0], ascending[-1]):
        last = int(np.searchsorted(ascending[:-1], least))
        yield order[last : last + 1]
