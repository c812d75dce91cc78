"""Which micro-batches are tried, so that the peak of any other can be told from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Protocol

import numpy as np
from torch import Tensor

from gradaccum.errors import ArgumentError, GradaccumError, PredictionError
from gradaccum.memory import AllocatorBytes, Budget, LiveBytes, Needs, Peaks, Probe, at_most, fit
from gradaccum.partition import Cap
from gradaccum.units import binary

# Of what the budget leaves for activations: most in a small probe of several samples, which tells
# what bytes grow with, and in a large one, which checks it.
_SMALL, _LARGE = 0.8, 0.5


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


def measured(
    num_samples: int,
    lengths: np.ndarray | None,
    trial: Trial,
    *,
    budget: Budget | None = None,
) -> Peaks:
    """Probe from the smallest micro-batch up, each only if those before say that it fits.

    Args:
        num_samples: Of an effective batch.
        lengths: ``(n,)`` tokens of its samples; None where they have none.
        trial: Runs some of them; must be open.
        budget: Bytes that may be used. Without one, shapes are chosen for the fit alone.

    Returns:
        The peak of any micro-batch.
    """
    told = np.ones(num_samples, dtype=np.int64) if lengths is None else np.maximum(lengths, 1)
    order = np.argsort(told, kind="stable")
    probing = Probing(trial, told, budget)
    lone = probing.begin(order)
    for positions in _alone(order, told[order]) if lone else ():
        probing.probe(positions, probing.fits_alone)
    for positions in _shapes(order, told[order]):
        probing.probe(positions, probing.fits_together)
    if budget is not None:
        probing.large(order)
    return probing.fitted()


class Probing:
    """Probes that were made, and whether the next one fits.

    Args:
        trial: Makes them.
        lengths: ``(n,)`` tokens of the samples, 1 where they have none.
        budget: Bytes that may be used; None for no bound.
    """

    def __init__(self, trial: Trial, lengths: np.ndarray, budget: Budget | None) -> None:
        self._trial, self._lengths, self._budget = trial, lengths, budget
        self._needs = trial.needs()
        self._limit = inf if budget is None else budget.bytes
        self._free = self._limit - self._needs.rest  # for activations
        self._probes: list[Probe] = []
        self._tried: set[tuple[int, int]] = set()
        self._failed: list[tuple[int, int]] = []

    def fitted(self) -> Peaks:
        """Return the peak of any micro-batch, as far as the probes tell."""
        return fit(self._probes, rest=self._needs.rest, update=self._needs.least)

    def begin(self, order: np.ndarray) -> bool:
        """Probe the shortest sample; or two, where one is too few, as for BatchNorm's statistics.

        Args:
            order: Positions, from the shortest sample to the longest.

        Returns:
            Whether samples can be probed alone.

        Raises:
            ArgumentError: The device has not enough memory for it.
        """
        lone = True
        try:
            self.probe(order[:1])
        except Exception as error:
            refused = isinstance(error, GradaccumError) and not isinstance(error, PredictionError)
            if refused or len(order) == 1:
                raise
            lone = False
            self.probe(order[:2])
        if self._probes:
            return lone
        length = int(self._lengths[order[0]])
        raise ArgumentError(
            f"memory={binary(self._limit)!r}",
            expected="a device with room for one sample",
            got=f"out of memory for the smallest of the effective batch ({length:,} tokens)"
            if length > 1
            else "out of memory for one sample",
            remedy="Free memory on the device, or take smaller samples or a smaller model.",
        )

    def probe(
        self, positions: np.ndarray, fits: Callable[[int, int], bool] = lambda *_: True
    ) -> None:
        """Probe a micro-batch, unless its shape was tried, or a smaller one has failed.

        Args:
            positions: Of its samples.
            fits: Whether it may be tried.
        """
        count, length = len(positions), int(self._lengths[positions].max())
        smaller_failed = any(n <= count and size <= length for n, size in self._failed)
        if (count, length) in self._tried or smaller_failed or not fits(count, length):
            return
        self._tried.add((count, length))
        found = self._trial.probe(positions, self._stop(count, length))
        if found is None:
            self._failed.append((count, length))
        else:
            self._probes.append(found)

    # Of one probe nothing is known of what its bytes grow with; the second is tried whatever.
    def fits_alone(self, count: int, length: int) -> bool:
        """Return whether a sample alone will fit."""
        alone = [probe for probe in self._probes if probe.count == 1]
        return len(alone) < 2 or self.fitted().predicted(count, length) <= self._limit

    def fits_together(self, count: int, length: int) -> bool:
        """Return whether several samples will fit, as far as that is known."""
        return self._bold(count) or at_most(self._probes)(count, length) <= _SMALL * self._free

    def _bold(self, count: int) -> bool:
        """Return whether so little is known of several samples that they are tried whatever."""
        return count > 1 and sum(probe.count > 1 for probe in self._probes) < 2

    def _stop(self, count: int, length: int) -> Budget | None:
        """Return where a probe is stopped: a bold one so early that no operation goes beyond."""
        if not self._probes:
            return None
        if self._budget is None or not self._bold(count):
            return self._budget
        last = max(self._probes, key=lambda probe: (probe.length, probe.count))
        growth = max(count / last.count, 1) * max(length / last.length, 1) ** 2
        operation = growth * float(np.diff(last.timeline, prepend=last.timeline[:1]).max())
        return Budget(bytes=max(int(self._limit - operation), 1))

    def large(self, order: np.ndarray) -> None:
        """Probe a large micro-batch: of the longest samples, as many as surely fit.

        Args:
            order: Positions, from the shortest sample to the longest.
        """
        cap = Cap(limit=max(_LARGE * self._free, 1), size=at_most(self._probes))
        for last in (len(order) - 1, len(order) // 2):
            most = min(last + 1, max(2, len(order) // 4))  # a quarter of the step's time, at most
            if (count := cap.most(int(self._lengths[order[last]]), most)) > 1:
                self.probe(order[last - count + 1 : last + 1])
                return


def watched(
    live: LiveBytes,
    *,
    held: Sequence[Tensor],
    inputs: Sequence[Tensor],
    run: Callable[[], int],
    count: int,
    length: int,
) -> Probe:
    """Run a micro-batch under a meter, in the middle of an effective batch.

    Args:
        live: Not yet entered.
        held: What is there at rest.
        inputs: Of the micro-batch, and of the one that waits on the device meanwhile.
        run: Forward and backward; returns the live bytes between the two.
        count: Samples.
        length: What they are padded to.

    Returns:
        What it was seen to need, above what is held.
    """
    live.follow(held)
    rest = live.live
    live.follow(inputs)
    waiting = live.live - rest
    device = held[0].device
    own = AllocatorBytes(device) if device.type == "cuda" else nullcontext(live)
    with own as meter:
        before = meter.live
        with live:
            kept = run() - rest
        peak = meter.peak - before + waiting
    timeline = np.frombuffer(live.timeline, dtype=np.int64) - rest
    return Probe(count=count, length=length, timeline=timeline, kept=kept, peak=peak)


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
