"""An effective batch before it is cut: measured once, and weighed once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaccum.batch import EffectiveBatch, LengthFunction, WeighFunction, effective_batch, weigh
from gradaccum.partition import Cut, Partition
from gradaccum.protocols import GradientSync, LocalSync
from gradaccum.share import share_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """An effective batch and what is known of it before it is cut.

    Args:
        samples: The effective batch.
        lengths: ``(n,)`` tokens of its samples; None where they have none.
        weighed: Its weights by term of the loss, if it was weighed.
    """

    samples: EffectiveBatch
    lengths: np.ndarray | None
    weighed: Mapping[str, float] | None = None

    @classmethod
    def of(
        cls,
        batch: Any,
        length: LengthFunction,
        weigh_by: WeighFunction | None = None,
        sync: GradientSync | None = None,
    ) -> "Prepared":
        """Prepare what a user has.

        Args:
            batch: As for `effective_batch`.
            length: Length of a sample in tokens.
            weigh_by: Weight of a sample, by term of the loss; None to leave it unweighed.
            sync: Agreement between ranks; of an `EffectiveBatch`, which all of them have, each
                takes its share. Samples that come otherwise are this rank's own.

        Returns:
            The effective batch, or this rank's share, measured and weighed once.
        """
        samples, sync = effective_batch(batch), sync or LocalSync()
        if isinstance(batch, EffectiveBatch):
            samples = share_of(samples, sync, length)
        weighed = None if weigh_by is None else sync.totals(weigh(samples, weigh_by))
        return cls(samples=samples, lengths=samples.lengths(length), weighed=weighed)

    @property
    def longest(self) -> int:
        """Length of the longest sample; 1 where they have none."""
        return self.padded(np.arange(len(self.samples)))

    def padded(self, positions: np.ndarray) -> int:
        """Return what the samples at some positions are padded to; 1 where they have no lengths."""
        return 1 if self.lengths is None else max(int(self.lengths[positions].max()), 1)

    def plan(self, cut: Cut) -> Partition:
        """Return its partition by a cut."""
        if not self.samples:
            return Partition(micro_batches=())
        return cut(len(self.samples), self.lengths, indices=self.samples.indices)
