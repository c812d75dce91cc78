"""A budget that is enforced where no device does it: on a CPU, at every operation."""

from dataclasses import dataclass

import torch

from gradaccum.memory.budget import Budget
from gradaccum.memory.meter import LiveBytes


@dataclass(frozen=True, slots=True)
class Enforced:
    """What `LiveBytes` calls: raises the error that CUDA raises when its memory is full.

    Args:
        budget: The most bytes that may be alive.
    """

    budget: Budget

    def __call__(self, live: int) -> None:
        """Refuse what an operation has added.

        Args:
            live: Bytes that are alive.

        Raises:
            torch.OutOfMemoryError: They are more than the budget.
        """
        if live > self.budget.bytes:
            raise torch.OutOfMemoryError(
                f"{live:,} bytes of tensors are alive; the budget is {self.budget.bytes:,}."
            )


def guarded(budget: Budget) -> LiveBytes:
    """Build a meter under which no operation may exceed a budget, in forward or backward.

    Args:
        budget: The most bytes that may be alive.

    Returns:
        A context manager.
    """
    return LiveBytes(limit=Enforced(budget))
