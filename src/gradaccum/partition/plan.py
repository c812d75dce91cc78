"""A partition: an effective batch cut into micro-batches. Decided once, then only followed."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from gradaccum.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition:
    """An effective batch cut into micro-batches.

    Args:
        micro_batches: For each micro-batch, in the order of the run, the positions of its samples
            in the effective batch. Each position occurs exactly once.
        lengths: ``(n,)`` length of each sample in tokens; None where unknown.
    """

    micro_batches: tuple[np.ndarray, ...]
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.micro_batches)

    @property
    def num_samples(self) -> int:
        """Samples in the effective batch."""
        return sum(len(positions) for positions in self.micro_batches)

    def padded_length(self, micro_batch: int) -> int:
        """Return the length that the samples of one micro-batch are padded to; 0 if unknown."""
        positions = self.micro_batches[micro_batch]
        return 0 if self.lengths is None else int(self.lengths[positions].max())

    @property
    def tokens(self) -> int:
        """Summed lengths of all samples; 0 where lengths are unknown."""
        return 0 if self.lengths is None else int(self.lengths.sum())

    @property
    def padded_tokens(self) -> int:
        """Positions that are computed, padding included; 0 where lengths are unknown."""
        return sum(len(self.micro_batches[k]) * self.padded_length(k) for k in range(len(self)))

    @property
    def real_share(self) -> float:
        """Share of the computed positions that are not padding, in (0, 1]."""
        return self.tokens / self.padded_tokens if self.padded_tokens else 1.0


def num_parts(total: int, size: int, *, last: str = "keep") -> int:
    """Return how many parts of `size` a `total` makes: the one rule for every count of steps.

    Args:
        total: Samples in an epoch, or micro-batches in a loader.
        size: How many make one part.
        last: ``"keep"`` counts a last, partial part; ``"drop"`` leaves it out.

    Returns:
        ``ceil(total / size)`` or ``floor(total / size)``.
    """
    return ceil(total / size) if last == "keep" else total // size


def accumulation_steps(
    *, effective_batch: int, micro_batch_size: int, world_size: int = 1, steps: int | None = None
) -> int:
    """Return the accumulation steps per device that make up an effective batch exactly.

    Args:
        effective_batch: Samples in one optimizer step, over all devices.
        micro_batch_size: Samples in one micro-batch on one device.
        world_size: Devices that share the effective batch.
        steps: Accumulation steps that the caller believes in; checked if given.

    Returns:
        ``effective_batch / (micro_batch_size * world_size)``.

    Raises:
        ArgumentError: The numbers contradict each other, or one is not a positive integer.
    """
    values = {
        "effective_batch": effective_batch,
        "micro_batch_size": micro_batch_size,
        "world_size": world_size,
        "steps": 1 if steps is None else steps,
    }
    call = ", ".join(
        f"{name}={value}" for name, value in values.items() if name != "steps" or steps is not None
    )
    call = f"accumulation_steps({call})"
    for name, value in values.items():
        require_positive(name, value, call=call)
    per_round = micro_batch_size * world_size
    needed, left = divmod(effective_batch, per_round)
    if left or (steps is not None and steps != needed):
        product = f"{micro_batch_size} x {world_size} x {steps or needed} = "
        raise ArgumentError(
            call,
            expected="effective_batch = micro_batch_size x world_size x steps",
            got=f"{product}{per_round * (steps or needed)}, not {effective_batch}",
            remedy="Leave one of the numbers out, or change one so that the product agrees.",
        )
    return needed


def require_positive(name: str, value: object, *, call: str | None = None) -> int:
    """Return `value` if it is a whole number of at least 1.

    Args:
        name: The argument's name, for the message.
        value: What the user passed.
        call: The call in the user's spelling; by default ``name=value``.

    Returns:
        The value as an int.

    Raises:
        ArgumentError: It is anything else.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1:
        return int(value)
    raise ArgumentError(
        call or f"{name}={value!r}",
        expected=f"{name} to be a whole number, at least 1",
        got=repr(value),
        remedy=f"Pass {name}=1 for the smallest.",
    )
