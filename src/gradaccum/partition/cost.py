"""What a micro-batch costs, and how large one may be.

A micro-batch of ``n`` samples padded to length ``L`` costs ``fixed + n * (L + squared * L**2)``,
in units of one token's time. All three are told, never timed while training: a cut that followed
the clock would make the order of additions, and so the last bits of a run, depend on the machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from gradaccum.errors import ArgumentError
from gradaccum.units import binary


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Time of one micro-batch, in units of the time of one token.

    Args:
        fixed: Cost of a micro-batch whatever its size: kernel launches, reading every weight once.
            Measured on 2 CPU cores with a GPT-2 of 4 M parameters: 48 tokens' time. A GPU, which
            is waiting while kernels are launched, has more.
        squared: Cost of attention, per token of the padded length.
    """

    fixed: float = 48.0
    squared: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fixed", "squared"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ArgumentError(
                    f"Cost({name}={value})",
                    expected="a finite cost of at least 0 tokens",
                    got=str(value),
                    remedy=f"Pass {name}=0 for none.",
                )

    def of_sample(self, length: np.ndarray) -> np.ndarray:
        """Return the cost of one sample padded to `length`, fixed part left out."""
        length = np.asarray(length, dtype=np.float64)
        return np.asarray(length + self.squared * length * length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What running out of memory has taught: long samples go fewer at a time.

    Args:
        length: Shortest padded length that this holds for.
        positions: Most positions (``count * length``) in a micro-batch; one sample is always let
            through.
        failed: Positions of the micro-batch that did not fit.
    """

    length: int
    positions: float
    failed: float

    def most(self, length: int) -> float:
        """Return how many samples of `length` this admits."""
        return max(1, self.positions // length) if length >= self.length else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """The most that one micro-batch may hold: a hard bound on ``size(count, length)``.

    Args:
        limit: The bound, in the unit of `size`.
        size: Size of a micro-batch of `count` samples padded to `length`; must not fall when
            `count` grows. The default counts tokens after padding, ``count * length``.
        unit: What is counted, for messages.
        bounds: Learnt by `below`.
        alone: Whether one sample is let through alone, whatever its size.
    """

    limit: float
    size: Callable[[int, int], float] | None = None
    unit: str = "tokens"
    bounds: tuple[Bound, ...] = ()
    alone: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.limit < float("inf"):
            raise ArgumentError(
                f"Cap(limit={self.limit})",
                expected=f"a positive number of {self.unit}",
                got=str(self.limit),
                remedy="Pass the largest micro-batch that fits on the device.",
            )

    def of(self, count: int, length: int) -> float:
        """Return the size of a micro-batch of `count` samples padded to `length`."""
        return float(count * length if self.size is None else self.size(count, length))

    def told(self, size: float) -> str:
        """Return a size in words: ``"8,192 tokens"``, ``"700 MiB"``."""
        return binary(size) if self.unit == "bytes" else f"{size:,.0f} {self.unit}"

    def most(self, length: int, available: int) -> int:
        """Return how many samples of `length` fit, at most `available`; 0 if not even one."""
        length, least = max(length, 1), int(self.alone)
        available = int(min([available, *(bound.most(length) for bound in self.bounds)]))
        if self.size is None:
            return max(min(int(self.limit // length), available), least)
        low, high = least, available
        while low < high:
            middle = (low + high + 1) // 2
            if self.size(middle, length) <= self.limit:
                low = middle
            else:
                high = middle - 1
        return low

    def below(self, count: int, length: int) -> "Cap":
        """Return the cap after a micro-batch has not fit that was thought to.

        Samples of its length, and of down to half of it, go at most half as many positions at a
        time; shorter ones have proved nothing and stay as they are.

        Args:
            count: Its samples, at least 2.
            length: What they were padded to; 1 where samples have no lengths.

        Returns:
            A lower cap.
        """
        length = max(length, 1)
        new = Bound(
            length=max(length // 2, 1),
            positions=float(count // 2 * length),
            failed=float(count * length),
        )
        kept = (b for b in self.bounds if b.length < new.length or b.positions < new.positions)
        return replace(self, bounds=(*kept, new))

    def relaxed(self) -> "Cap":
        """Return the cap with each bound a quarter higher; one that reaches its failure is gone."""
        grown = (replace(bound, positions=bound.positions * 1.25) for bound in self.bounds)
        return replace(self, bounds=tuple(b for b in grown if b.positions < b.failed))
