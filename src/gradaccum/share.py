"""The share of an effective batch that one rank computes."""

from typing import Any
from zlib import crc32

import numpy as np

from gradaccum.batch import EffectiveBatch, LengthFunction
from gradaccum.collate import CollateFunction
from gradaccum.errors import ArgumentError
from gradaccum.partition import deal
from gradaccum.protocols import GradientSync


class Share(EffectiveBatch):
    """Some samples of an effective batch.

    Args:
        whole: The effective batch.
        positions: ``(n,)`` positions of the samples in it.
    """

    def __init__(self, whole: EffectiveBatch, positions: np.ndarray) -> None:
        self._whole, self._positions = whole, positions
        self.indices = None if whole.indices is None else whole.indices[positions]
        self.dataset_lengths, self.lr_scale = whole.dataset_lengths, whole.lr_scale

    def __len__(self) -> int:
        return len(self._positions)

    def lengths(self, length: LengthFunction) -> np.ndarray | None:
        """Return the lengths of its samples."""
        found = self._whole.lengths(length)
        return None if found is None else found[self._positions]

    def sample(self, position: int) -> Any:
        """Return one sample."""
        return self._whole.sample(int(self._positions[position]))

    def micro_batch(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Return some of its samples as one micro-batch."""
        return self._whole.micro_batch(self._positions[positions], collate)

    def peek(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Return samples as one micro-batch, leaving what was read ahead in its place."""
        return self._whole.peek(self._positions[positions], collate)


def share_of(whole: EffectiveBatch, sync: GradientSync, length: LengthFunction) -> EffectiveBatch:
    """Return the share of this rank.

    Args:
        whole: An effective batch that every rank has.
        sync: Agreement between ranks.
        length: Length of a sample in tokens, by which work is balanced.

    Returns:
        Its samples; there may be none. Of one rank alone, the effective batch itself.

    Raises:
        ArgumentError: Ranks have different ones.
    """
    if sync.ranks == 1:
        return whole
    found = sync.totals({_fingerprint(whole): 1})
    if len(found) > 1:
        raise ArgumentError(
            "step(batch)",
            expected="the same effective batch on every rank, of which each computes its share",
            got=" and ".join(f"{size} samples on {n:g} rank(s)" for (size, _), n in found.items()),
            remedy="Give gradaccum.effective_batches the same dataset and seed on every rank; or, "
            "where each reads its own samples, pass them to step as a list.",
        )
    return Share(whole, deal(len(whole), whole.lengths(length), sync.ranks)[sync.rank])


def _fingerprint(whole: EffectiveBatch) -> tuple[int, int]:
    """Return how many samples, and a checksum of which."""
    named = b"" if whole.indices is None else np.ascontiguousarray(whole.indices).tobytes()
    return len(whole), crc32(named)
