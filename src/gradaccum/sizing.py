"""How large micro-batches may be: told, or found with a few small ones under a budget."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from gradaccum.errors import ArgumentError
from gradaccum.memory import Budget, Needs
from gradaccum.partition import Cap, CappedCut, Cost, Cut, FixedCut
from gradaccum.probing import Trial, measured
from gradaccum.units import binary

_MOST_SAMPLES = 2**20  # in a micro-batch, whatever the memory


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
        require_least(trial.needs(), self.budget)
        with trial.opened():
            peaks = measured(num_samples, lengths, trial, budget=self.budget)
        cap = Cap(limit=self.budget.bytes, size=peaks, unit="bytes")
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
            got=", ".join(f"{part} {binary(size)}" for part, size in needs.parts().items() if size),
            remedy="Raise memory, train fewer parameters, or use an optimizer with less state.",
        )
