"""What a dataset is: samples that are read by index, or that come one after the other."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from gradaccum.errors import ArgumentError

Last = Literal["keep", "drop"]


@runtime_checkable
class MapStyle(Protocol):
    """A dataset whose samples are read by index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample."""

    def __len__(self) -> int:
        """Return the number of samples."""


def require_last(last: object, *, call: str) -> None:
    """Refuse what is neither ``"keep"`` nor ``"drop"``.

    Args:
        last: What the user passed.
        call: What was called.

    Raises:
        ArgumentError: It is anything else.
    """
    if last not in ("keep", "drop"):
        raise ArgumentError(
            f"{call}(last={last!r})",
            expected='"keep" or "drop"',
            got=repr(last),
            remedy='Pass last="keep" to use every sample.',
        )


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
