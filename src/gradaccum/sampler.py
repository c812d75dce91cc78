"""Length-ordered effective batches for another trainer: the one line that it has to change."""

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
from torch.utils.data import Sampler

from gradaccum.choices import require_one_of
from gradaccum.dataset import Last
from gradaccum.errors import ArgumentError
from gradaccum.partition import by_length, fixed, num_parts, require_positive
from gradaccum.partition.cut import checked_lengths
from gradaccum.rng import data_order, require_seed


class EffectiveBatchSampler(Sampler[list[int]]):
    """A batch sampler that sorts each effective batch by length before it cuts it.

    Which samples share an optimizer step is random, as with any shuffled sampler; which of them
    share a micro-batch follows length, so little is padded. Give it as ``batch_sampler=`` to a
    DataLoader, of Hugging Face's Trainer, Accelerate, Lightning or a loop of your own, together
    with ``size / micro_batch_size`` accumulation steps over all ranks.

    Args:
        lengths: ``(n,)`` tokens of each sample.
        size: Samples in an effective batch, over all ranks.
        micro_batch_size: Samples in a micro-batch; must divide `size`.
        shuffle: Whether samples are shuffled.
        seed: Seed of the order.
        last: Whether a last, partial effective batch is kept or dropped; one that is the only
            one of its epoch is kept in any case.

    Raises:
        ArgumentError: The micro-batch size does not divide the size.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        size: int,
        micro_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "keep",
    ) -> None:
        self._lengths = checked_lengths(lengths, len(lengths))
        require_one_of("last", last, get_args(Last), call="EffectiveBatchSampler")
        for name, value in (("size", size), ("micro_batch_size", micro_batch_size)):
            require_positive(name, value, call=f"EffectiveBatchSampler({name}={value!r})")
        if size % micro_batch_size:
            raise ArgumentError(
                f"EffectiveBatchSampler(size={size}, micro_batch_size={micro_batch_size})",
                expected="a size that is a multiple of the micro-batch size",
                got=f"a remainder of {size % micro_batch_size} samples",
                remedy="Change one of the two, so that every effective batch has as many "
                "micro-batches as the trainer accumulates.",
            )
        self.accumulation_steps = size // micro_batch_size
        self.batch_size, self.drop_last = micro_batch_size, last == "drop"  # Accelerate reads both
        require_seed(seed, call=f"EffectiveBatchSampler(seed={seed!r})")
        self._size, self._shuffle, self._seed, self._last = size, shuffle, seed, last
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch.

        Without it, an epoch that was iterated over to its end is followed by the one after; one
        that was left early comes again.

        Args:
            epoch: From 0.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the micro-batches of an epoch."""
        total = len(self._lengths)
        return num_parts(min(total, self._num_steps() * self._size), self.batch_size)

    def _num_steps(self) -> int:
        return max(1, num_parts(len(self._lengths), self._size, last=self._last))

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the micro-batches of an epoch.

        Yields:
            Indices of the samples of a micro-batch.
        """
        total = len(self._lengths)
        order = np.arange(total)
        if self._shuffle:
            order = data_order(total, seed=self._seed, epoch=self._epoch)
        for k in range(self._num_steps()):
            indices = order[k * self._size : (k + 1) * self._size]
            indices = indices[by_length(self._lengths[indices])]
            for positions in fixed(len(indices), self.batch_size):
                yield indices[positions].tolist()
        self._epoch += 1
