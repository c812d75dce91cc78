"""What a dataset is: samples that are read by index, or that come one after the other."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from gradaccum.errors import ArgumentError, DataError
from gradaccum.partition.cut import checked_lengths

Last = Literal["keep", "drop"]


@runtime_checkable
class MapStyle(Protocol):
    """A dataset whose samples are read by index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


def is_map_style(dataset: Any, workers: int) -> bool:
    """Return whether the samples of a dataset are read by index.

    Args:
        dataset: What the user passed.
        workers: Processes that are to read it.

    Returns:
        False for one that is iterated.

    Raises:
        ArgumentError: It is no dataset, or its workers would each give every sample.
    """
    if isinstance(dataset, DataLoader):
        raise ArgumentError(
            "effective_batches(DataLoader)",
            expected="a dataset of single samples",
            got="a loader of micro-batches that are collated already",
            remedy="Pass loader.dataset, or use accumulator.over(loader, steps=...).",
        )
    if isinstance(dataset, (Mapping, str)) or not isinstance(dataset, (MapStyle, Iterable)):
        raise ArgumentError(
            f"effective_batches({type(dataset).__name__})",
            expected="a dataset with len() and indexing, or an iterable of samples",
            got=type(dataset).__name__,
            remedy="Wrap columns of tensors in torch.utils.data.TensorDataset.",
        )
    if isinstance(dataset, MapStyle) and not isinstance(dataset, IterableDataset):
        return True
    if workers > 1 and not isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"effective_batches(iterable, workers={workers})",
            expected="one worker, since each would give every sample again",
            got=f"{workers} workers for a {type(dataset).__name__}",
            remedy="Pass workers=1, or an IterableDataset that shards itself by worker.",
        )
    return False


def known_lengths(
    lengths: Sequence[int] | np.ndarray | None, dataset: Any, *, map_style: bool
) -> np.ndarray | None:
    """Return the lengths of the samples of a dataset, if a user knows them.

    Args:
        lengths: What the user passed.
        dataset: Beside it.
        map_style: Whether its samples are read by index.

    Returns:
        ``(n,)`` int64, or None.

    Raises:
        DataError: The dataset is empty.
        ArgumentError: They do not go with the dataset.
    """
    if map_style and len(dataset) == 0:
        raise DataError(
            "effective_batches(dataset)",
            expected="at least one sample",
            got="an empty dataset",
            remedy="Check the path or the filter that made it.",
        )
    if lengths is not None and not map_style:
        raise ArgumentError(
            "effective_batches(iterable, lengths=...)",
            expected="lengths with a dataset that has len() and indexing",
            got=type(dataset).__name__,
            remedy="Leave lengths out; the accumulator measures samples as they come.",
        )
    return None if lengths is None else checked_lengths(lengths, len(dataset))
