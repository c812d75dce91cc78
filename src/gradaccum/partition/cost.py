"""What a micro-batch costs, and how large one may be.

A micro-batch of ``n`` samples padded to length ``L`` costs ``fixed + n * (L + squared * L**2)``,
in units of one token's time. All three are told, never timed while training: a cut that followed
the clock would make the order of additions, and so the last bits of a run, depend on the machine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradaccum.errors import ArgumentError


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
class Cap:
    """The most that one micro-batch may hold: a hard bound on ``size(count, length)``.

    Args:
        limit: The bound, in the unit of `size`.
        size: Size of a micro-batch of `count` samples padded to `length`; must not fall when
            either grows. The default counts tokens after padding, ``count * length``.
        unit: What is counted, for messages.
    """

    limit: float
    size: Callable[[int, int], float] | None = None
    unit: str = "tokens"

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

    def most(self, length: int, available: int) -> int:
        """Return how many samples of `length` fit, at most `available`; 0 if not even one."""
        if self.size is None:
            return min(int(self.limit // max(length, 1)), available)
        low, high = 0, available
        while low < high:
            middle = (low + high + 1) // 2
            if self.size(middle, length) <= self.limit:
                low = middle
            else:
                high = middle - 1
        return low
