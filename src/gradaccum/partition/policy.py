"""How effective batches are to be cut: a choice, made once and applied to each of them."""

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from gradaccum.errors import ArgumentError
from gradaccum.partition.cost import Bound, Cap, Cost
from gradaccum.partition.cut import admit, fixed, optimal
from gradaccum.partition.plan import Partition, require_positive


class Cut(Protocol):
    """A way of cutting effective batches."""

    def __call__(
        self,
        num_samples: int,
        lengths: np.ndarray | None,
        *,
        indices: np.ndarray | None = None,
    ) -> Partition:
        """Cut an effective batch; `indices` are its samples' places in the dataset."""

    def admit(self, lengths: np.ndarray) -> None:
        """Raise if a dataset has a sample that no micro-batch may hold."""

    def below(self, count: int, length: int) -> "Cut":
        """Return the cut after a micro-batch of `count` samples, padded to `length`, did not fit.

        Args:
            count: At least 2.
            length: 1 where samples have no lengths.
        """

    def relaxed(self) -> "Cut":
        """Return the cut after a while in which everything fit."""


def with_bounds_of(cut: Cut, learnt: Cut | None) -> Cut:
    """Return a cut that keeps what another has learnt by `below`.

    Args:
        cut: A new one.
        learnt: The one before; None for none.

    Returns:
        The new cut with the bounds of the other, where both are of one kind.
    """
    if isinstance(cut, FixedCut) and isinstance(learnt, FixedCut):
        return replace(cut, bounds=learnt.bounds)
    if isinstance(cut, CappedCut) and isinstance(learnt, CappedCut):
        return replace(cut, cap=replace(cut.cap, bounds=learnt.cap.bounds))
    return cut


def letting_through(cut: Cut) -> Cut:
    """Return a cut that lets any sample through alone: for forward passes, which need less.

    Args:
        cut: Any.

    Returns:
        The cut, without a cap on one sample.
    """
    if isinstance(cut, CappedCut):
        return replace(cut, cap=replace(cut.cap, alone=True))
    return cut


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedCut:
    """Micro-batches of a fixed number of samples, those of like length together.

    Args:
        size: Samples in one micro-batch.
        bounds: Learnt by `below`.
    """

    size: int
    bounds: tuple[Bound, ...] = ()

    def __post_init__(self) -> None:
        require_positive("micro_batch_size", self.size)

    def __str__(self) -> str:
        return f"{self.size:,} samples"

    def __call__(
        self,
        num_samples: int,
        lengths: np.ndarray | None,
        *,
        indices: np.ndarray | None = None,
    ) -> Partition:
        """Cut an effective batch."""
        return fixed(num_samples, self.size, lengths=lengths, bounds=self.bounds)

    def admit(self, lengths: np.ndarray) -> None:
        """Return: any sample fits."""

    def below(self, count: int, length: int) -> "FixedCut":
        """Return a cut into fewer samples at a time, where they are about as long."""
        return replace(self, bounds=self._cap().below(count, length).bounds)

    def relaxed(self) -> "FixedCut":
        """Return a cut with its bounds a quarter higher."""
        return replace(self, bounds=self._cap().relaxed().bounds)

    def _cap(self) -> Cap:
        return Cap(limit=self.size, bounds=self.bounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class CappedCut:
    """The cheapest micro-batches under a hard cap.

    Args:
        cap: The most that one may hold.
        cost: What one costs.
    """

    cap: Cap
    cost: Cost = field(default_factory=Cost)

    def __str__(self) -> str:
        return f"at most {self.cap.told(self.cap.limit)}"

    def __call__(
        self,
        num_samples: int,
        lengths: np.ndarray | None,
        *,
        indices: np.ndarray | None = None,
    ) -> Partition:
        """Cut an effective batch.

        Args:
            num_samples: Samples in it.
            lengths: ``(n,)`` tokens.
            indices: ``(n,)`` places in the dataset, for messages.

        Returns:
            The partition.

        Raises:
            ArgumentError: Lengths are unknown.
        """
        if lengths is None:
            raise ArgumentError(
                f"micro_batch_{self.cap.unit}={self.cap.limit:g}",
                expected="samples whose lengths are known",
                got=f"{num_samples} samples without a length",
                remedy="Pass accumulator(..., length=lambda sample: len(sample[...])) and a list "
                "of samples, or micro_batch_size.",
            )
        return optimal(lengths, self.cap, cost=self.cost, indices=indices)

    def admit(self, lengths: np.ndarray) -> None:
        """Raise `SampleTooLargeError` if one sample alone exceeds the cap."""
        admit(lengths, self.cap)

    def below(self, count: int, length: int) -> "CappedCut":
        """Return a cut into fewer samples at a time, where they are about as long."""
        return replace(self, cap=self.cap.below(count, length))

    def relaxed(self) -> "CappedCut":
        """Return a cut with its bounds a quarter higher."""
        return replace(self, cap=self.cap.relaxed())
