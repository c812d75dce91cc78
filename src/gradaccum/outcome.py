"""How an optimizer step ended, as a value that the engine hands back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from math import isfinite
from types import MappingProxyType
from typing import Any


class Outcome(Enum):
    """How an effective batch ended. The value of each member is its sentence.

    The scheduler, averages of the weights and ``Counters.optimizer_steps`` move on `STEPPED` only.
    """

    STEPPED = "The optimizer moved the parameters."
    SKIPPED_OVERFLOW = "A scaled gradient overflowed; nothing moved and the loss scale was lowered."
    SKIPPED_NONFINITE = "The gradient was infinite or not a number; nothing moved."
    SKIPPED_EMPTY = "No sample in this effective batch carried weight; nothing moved."

    @property
    def stepped(self) -> bool:
        """Whether the parameters moved."""
        return self is Outcome.STEPPED

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One named term of a loss over an effective batch.

    Args:
        loss: The term's mean, ``sum / weight``; 0 where nothing carried weight.
        weight: What its sum was divided by.
    """

    loss: float
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The mean loss of some samples.

    Args:
        loss: ``sum_i s_i / sum_i w_i``; the sum of the terms' means where there are several.
        weight: What the summed loss was divided by; 1 where there are several terms.
        samples: How many samples.
        tokens: Their summed lengths; 0 where lengths are unknown.
        terms: The named terms of the loss.
    """

    loss: float
    weight: float
    samples: int
    tokens: int
    terms: Mapping[str, Term]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one effective batch did. All numbers are of the whole effective batch.

    Args:
        outcome: How it ended.
        loss: The mean loss, ``sum_i s_i / sum_i w_i``; NaN when nothing carried weight.
        weight: What the summed gradient was divided by. With several named terms, each sum is
            divided by its own weight (see `terms`) and this is 1.
        grad_norm: 2-norm of the normalised gradient, before clipping.
        lr: Learning rate of the first parameter group that this update used.
        samples: Samples in this effective batch.
        tokens: Their summed lengths; 0 where lengths are unknown.
        padded_tokens: Positions computed, padding included; 0 where lengths are unknown.
        micro_batches: Accumulation steps that it took (on this rank), without dropped ones.
        optimizer_step: Optimizer steps made so far, this one included.
        seconds: Wall time from the first micro-batch to the end of the update, replays included.
        dropped: Micro-batches that were left out since their loss was not finite; their samples
            and tokens do not count above.
        replays: How often it ran out of memory and was run again in smaller micro-batches.
        peak_allocated: The most bytes of tensors on a CUDA device so far; None elsewhere.
        peak_reserved: The most bytes that its allocator held so far, fragments included.
        terms: The named terms of the loss; empty for a loss of one unnamed term.
    """

    outcome: Outcome
    loss: float
    weight: float
    grad_norm: float
    lr: float
    samples: int
    tokens: int
    padded_tokens: int
    micro_batches: int
    optimizer_step: int
    seconds: float
    dropped: int = 0
    replays: int = 0
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    terms: Mapping[str, Term] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def padding(self) -> float:
        """Share of all computed positions that were padding, in [0, 1)."""
        return 1.0 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values, the outcome by its lower-case name; None where not finite."""
        names = (name for name in self.__slots__ if name not in {"outcome", "terms"})
        plain: dict[str, Any] = {"outcome": str(self.outcome)}
        plain |= {name: _finite(getattr(self, name)) for name in names}
        plain["padding"] = self.padding
        plain["terms"] = {name: asdict(term) for name, term in self.terms.items()}
        return plain


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """What was done so far: separate counts, never derived from each other.

    Args:
        micro_steps: Micro-batches whose gradients were added.
        optimizer_steps: Updates of the parameters.
        skipped: Effective batches that ended without an update.
        samples: Samples seen, those of skipped effective batches included.
        tokens: Their summed lengths, where known.
    """

    micro_steps: int = 0
    optimizer_steps: int = 0
    skipped: int = 0
    samples: int = 0
    tokens: int = 0

    def within(self, micro_batches: int) -> "Counters":
        """Return the counts in an effective batch of which some micro-batches are in."""
        return replace(self, micro_steps=self.micro_steps + micro_batches)

    def after(
        self, *, outcome: Outcome, micro_batches: int, samples: int, tokens: int
    ) -> "Counters":
        """Return the counts after one more effective batch."""
        return replace(
            self,
            micro_steps=self.micro_steps + micro_batches,
            optimizer_steps=self.optimizer_steps + outcome.stepped,
            skipped=self.skipped + (not outcome.stepped),
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
        )

    def as_dict(self) -> dict[str, int]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> "Counters":
        """Return the counts that `as_dict` returned.

        Args:
            values: One whole number of at least 0 for each count.

        Returns:
            The counts.

        Raises:
            ValueError: A count is missing, unknown or no such number.
        """
        if values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"counts are {', '.join(cls.__dataclass_fields__)}")
        if bad := {k: v for k, v in values.items() if type(v) is not int or v < 0}:
            raise ValueError(f"not a count: {bad}")
        return cls(**values)
