"""A step as a transaction: it is made as if nothing had failed, or the state is as before it.

Catching an out-of-memory and running one micro-batch again would be wrong: autograd has added a
part of its gradient already. So the whole effective batch runs again, from the same random numbers
and buffers, in smaller micro-batches.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from gradaccum.errors import SampleTooLargeError
from gradaccum.partition import Cut
from gradaccum.snapshot import Snapshot

T = TypeVar("T")

# What allocators say that do not raise torch.OutOfMemoryError.
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_PATIENCE = 32  # effective batches without a failure before more is tried
_MOST_PATIENCE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TooLarge:
    """A micro-batch that did not fit.

    Args:
        count: Its samples.
        length: What they were padded to; 1 where samples have no lengths.
        sample: What its longest sample is called in a message.
        message: What the allocator said.
    """

    count: int
    length: int
    sample: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(Generic[T]):
    """What a transaction returned.

    Args:
        value: What the last attempt returned.
        replays: How many attempts before it ran out of memory.
    """

    value: T
    replays: int


class Recovery:
    """Runs attempts until one fits, each with a smaller cut than the one before.

    Args:
        model: Its buffers, and the random generators of its devices, are put back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._quiet, self._patience, self._relaxed = 0, _PATIENCE, False
        self.cut: Cut | None = None

    def run(self, cut: Cut, attempt: Callable[[Cut], T | TooLarge], *, learn: bool) -> Done[T]:
        """Run attempts until one fits.

        Args:
            cut: How the first cuts.
            attempt: Returns what it made; or `TooLarge`, holding nothing of what it ran. If it
                raises, generators and buffers are put back, and the error goes on.
            learn: Whether what did not fit now shall count for the time to come.

        Returns:
            What the last attempt returned.

        Raises:
            SampleTooLargeError: One sample alone does not fit.
        """
        snapshot = Snapshot(self._model)
        replays = 0
        while True:
            try:
                found = attempt(cut)
            except BaseException:
                snapshot.restore()
                raise
            if not isinstance(found, TooLarge):
                break
            snapshot.restore()
            _free()
            if found.count == 1:
                raise SampleTooLargeError(
                    f"{found.sample} (length {found.length:,})"
                    if found.length > 1
                    else found.sample,
                    expected="room for one sample on the device",
                    got=found.message.splitlines()[0] if found.message else "out of memory",
                    remedy="Truncate it, free memory on the device, or let a sample need less: "
                    "activation checkpointing (use_reentrant=False), a loss head in chunks.",
                )
            cut = cut.below(found.count, found.length)
            replays += 1
        if learn:
            self.cut = self._calmed(cut, replays)
        return Done(value=found, replays=replays)

    def _calmed(self, cut: Cut, replays: int) -> Cut:
        """Return the cut for the next effective batch: a little larger after a quiet while."""
        if replays:
            if self._relaxed:  # what was tried again has failed again
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self._quiet, self._relaxed = 0, False
            return cut
        self._quiet += 1
        if self._quiet % self._patience:
            return cut
        relaxed = cut.relaxed()
        self._relaxed = self._relaxed or relaxed != cut
        return relaxed


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is full.

    Args:
        error: Any error.

    Returns:
        False for all other errors, whatever their type.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(told in str(error) for told in _MESSAGES)


def _free() -> None:
    """Give back what a failed attempt has left: cycles, and blocks that are cached."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
