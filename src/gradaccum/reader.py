"""Reading the samples of a dataset in a known order, some of them ahead, in worker processes."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from gradaccum.batch import EffectiveBatch, LengthFunction
from gradaccum.collate import CollateFunction


class Unread(EffectiveBatch):
    """An effective batch whose samples are read when their micro-batch comes up."""

    def __init__(self, reader: "Reader", indices: np.ndarray, lengths: np.ndarray) -> None:
        self._reader, self._start = reader, reader.planned(len(indices))
        self.indices, self.dataset_lengths = indices, lengths

    def __len__(self) -> int:
        return 0 if self.indices is None else len(self.indices)

    def lengths(self, length: LengthFunction) -> np.ndarray | None:
        """Return the lengths that came with the dataset."""
        known, indices = self.dataset_lengths, self.indices
        return None if known is None or indices is None else known[indices]

    def sample(self, position: int) -> Any:
        """Read one sample, and keep what was read ahead in its place."""
        return self._reader.sample(self._start + position)

    def micro_batch(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Read and collate samples, which are given up after."""
        return collate([self._reader.take(self._start + k) for k in positions.tolist()])

    def peek(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Read and collate samples one by one, leaving what was read ahead in its place."""
        return collate([self.sample(k) for k in positions.tolist()])


class Reader:
    """Reads the samples of an epoch in a known order, some of them ahead.

    A sample that is asked for out of order is read at once, by itself.
    """

    def __init__(self, dataset: Any, indices: np.ndarray, chunks: Iterable[list[Any]]) -> None:
        self._dataset, self._indices = dataset, indices
        self._ahead = chain.from_iterable(chunks)
        self._next = 0  # place of the sample that comes out of `_ahead` next
        self._planned = 0

    def planned(self, count: int) -> int:
        """Return where the next effective batch of `count` samples begins."""
        start, self._planned = self._planned, self._planned + count
        return start

    def read(self, count: int) -> list[Any]:
        """Return the next samples."""
        start = self.planned(count)
        return [self.take(place) for place in range(start, start + count)]

    def take(self, place: int) -> Any:
        """Return the sample at a place in the order of the epoch."""
        if place < self._next:
            return self.sample(place)
        while self._next < place:  # left unread by an effective batch that was not run
            next(self._ahead)
            self._next += 1
        self._next += 1
        return next(self._ahead)

    def sample(self, place: int) -> Any:
        """Return the sample at a place without moving on."""
        return self._dataset[int(self._indices[place])]


def reader_of(
    dataset: Any,
    batches: list[np.ndarray],
    *,
    workers: int,
    lazy: bool,
    generator: torch.Generator,
) -> Reader:
    """Build a reader of the samples of an epoch.

    Args:
        dataset: Map-style.
        batches: Indices of its effective batches, in the order in which they will be asked for.
        workers: Processes that read; 0 reads when a sample is asked for.
        lazy: Whether samples are asked for one micro-batch at a time.
        generator: Seeds the workers.

    Returns:
        The reader.
    """
    indices = np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)
    if not workers:
        return Reader(dataset, indices, ([dataset[k]] for k in indices.tolist()))
    chunks: list[list[int]] = []
    for batch in batches:  # by itself, as it may be many times as large as the one before it
        # Decoded photographs are large: of samples that are read one by one, few wait at a time.
        chunk = min(_chunk(len(batch), workers), 8) if lazy else _chunk(len(batch), workers)
        chunks += [batch[k : k + chunk].tolist() for k in range(0, len(batch), chunk)]
    loader = DataLoader(
        dataset,
        batch_sampler=_Fixed(chunks),
        num_workers=workers,
        collate_fn=_as_list,
        prefetch_factor=2,
        generator=generator,
    )
    return Reader(dataset, indices, loader)


def _chunk(size: int, workers: int) -> int:
    """Return how many samples a worker reads at a time.

    Each worker has two chunks under way, so all of them together are one effective batch ahead.
    """
    return max(1, -(-size // (2 * max(workers, 1))))


class _Fixed(Sampler[list[int]]):
    """Index lists that were made beforehand."""

    def __init__(self, chunks: list[list[int]]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)


def _as_list(samples: list[Any]) -> list[Any]:
    return samples


class _Wrapped(IterableDataset[Any]):
    """Any iterable, as torch's DataLoader wants it."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def in_turn(
    dataset: Iterable[Any], *, size: int, workers: int, generator: torch.Generator
) -> Iterator[Any]:
    """Iterate over the samples of an iterable dataset.

    Args:
        dataset: Any iterable of samples.
        size: Samples that workers read ahead in all.
        workers: Processes that read; 0 reads in this one.
        generator: Seeds the workers.

    Returns:
        An iterator over single samples.
    """
    if not workers:
        return iter(dataset)
    loader = DataLoader(
        dataset if isinstance(dataset, IterableDataset) else _Wrapped(dataset),
        batch_size=_chunk(size, workers),
        num_workers=workers,
        collate_fn=_as_list,
        generator=generator,
    )
    return chain.from_iterable(loader)
