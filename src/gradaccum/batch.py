"""An effective batch: how many samples, how long, and how to get a micro-batch of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from gradaccum.collate import CollateFunction
from gradaccum.errors import ArgumentError
from gradaccum.tree import flat, leaves, map_leaves

T = TypeVar("T")

LengthFunction = Callable[[Any], int | None]
"""From a sample to its length in tokens; None where it has none."""

WeighFunction = Callable[[Any], "Mapping[str, float] | float"]
"""From a sample to its weight, or to its weight in each term of the loss."""


class EffectiveBatch(ABC):
    """The samples whose gradients make one optimizer step.

    Indices and lengths come first, so that it can be cut before a single sample is read.
    """

    indices: np.ndarray | None = None
    """``(n,)`` places of the samples in the dataset; None where it has no order."""

    dataset_lengths: np.ndarray | None = None
    """Lengths in tokens of all samples of the dataset, where they are known beforehand."""

    lr_scale: float = 1.0
    """What the learning rate is multiplied by for the optimizer step of this one alone."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def lengths(self, length: LengthFunction) -> np.ndarray | None:
        """Return ``(n,)`` lengths in tokens; None where they are unknown."""

    @abstractmethod
    def sample(self, position: int) -> Any:
        """Return one sample."""

    def __iter__(self) -> Iterator[Any]:
        return (self.sample(position) for position in range(len(self)))

    def __repr__(self) -> str:
        return f"<effective batch of {len(self)} samples>"

    @abstractmethod
    def micro_batch(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Return the samples at these positions as one micro-batch, on the host."""

    def name(self, position: int) -> str:
        """Return what a sample is called in a message: its place in the dataset, if it has one."""
        if self.indices is None:
            return f"sample {position} of the effective batch"
        return f"sample {self.indices[position]}"

    def peek(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Return samples as one micro-batch, leaving what was read ahead in its place."""
        return self.micro_batch(positions, collate)


class Samples(EffectiveBatch):
    """An effective batch of samples that are in memory.

    Args:
        samples: At least one.
        indices: ``(n,)`` their places in the dataset; None where it has no order.
    """

    def __init__(self, samples: Sequence[Any], indices: np.ndarray | None = None) -> None:
        self._samples, self.indices = samples, indices

    def __len__(self) -> int:
        return len(self._samples)

    def lengths(self, length: LengthFunction) -> np.ndarray | None:
        """Return the lengths that the function finds."""
        found = [length(sample) for sample in self._samples]
        return None if any(value is None for value in found) else np.asarray(found)

    def sample(self, position: int) -> Any:
        """Return one sample."""
        return self._samples[position]

    def micro_batch(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Collate the samples."""
        return collate([self._samples[k] for k in positions.tolist()])


class Rows(EffectiveBatch):
    """An effective batch that was collated as a whole, cut along the first dimension.

    Args:
        tree: Any tree of tensors with the samples along their first dimension.
    """

    def __init__(self, tree: Any) -> None:
        size = common_size(tree)
        if size is None or not all(isinstance(leaf, Tensor) for leaf in flat(tree)):
            got = {path: getattr(leaf, "shape", type(leaf).__name__) for path, leaf in leaves(tree)}
            raise ArgumentError(
                "step(batch)",
                expected="tensors that all have the samples along their first dimension",
                got=", ".join(f"{path} {what}" for path, what in got.items()),
                remedy="Pass a list of samples instead, and let the accumulator collate them.",
            )
        self._tree, self._size = tree, size

    def __len__(self) -> int:
        return self._size

    def lengths(self, length: LengthFunction) -> np.ndarray | None:
        """Return None: rows are padded already, so every one is as long as the longest."""
        return None

    def sample(self, position: int) -> Any:
        """Return one row, without its first dimension."""
        return self._take(position)

    def micro_batch(self, positions: np.ndarray, collate: CollateFunction) -> Any:
        """Return some rows; a view where they follow each other."""
        places = positions.tolist()
        if places == list(range(places[0], places[0] + len(places))):
            return self._take(slice(places[0], places[0] + len(places)))
        return self._take(places)

    def _take(self, index: int | slice | list[int]) -> Any:
        return map_leaves(lambda leaf: leaf[index], self._tree)


def common_size(tree: Any) -> int | None:
    """Return the first dimension that all tensors of a collated tree share.

    Args:
        tree: Any tree.

    Returns:
        The number of samples; None if there is no such dimension.
    """
    size: int | None = None
    for leaf in flat(tree):
        if isinstance(leaf, Tensor):
            if leaf.ndim == 0 or size not in (None, leaf.shape[0]):
                return None
            size = leaf.shape[0]
    return size


def effective_batch(batch: Any) -> EffectiveBatch:
    """Build an effective batch from what a user has.

    Args:
        batch: An `EffectiveBatch`; a list of samples; or a collated tree of tensors (a mapping,
            a tuple, a dataclass, one tensor).

    Returns:
        The effective batch.

    Raises:
        ArgumentError: It is empty, holds no tensor, or is a list of bare tensors, which might
            be either.
    """
    if isinstance(batch, EffectiveBatch):
        return batch
    if isinstance(batch, list):
        if batch and not isinstance(batch[0], Tensor):
            return Samples(batch)
        got = "a list of bare tensors" if batch else "an empty list"
    elif any(isinstance(leaf, Tensor) for leaf in flat(batch)):
        return Rows(batch)
    else:
        got = f"{type(batch).__name__} without a tensor"
    raise ArgumentError(
        "step(batch)",
        expected="a list of samples, or collated tensors with the samples along dimension 0",
        got=got,
        remedy="Pass tuple(batch) if it is collated; if its items are samples, "
        "pass [(x,) for x in batch].",
    )


def default_length(sample: Any) -> int | None:
    """Return the number of ``input_ids`` of a sample, as tokenizers make them.

    Args:
        sample: Any sample.

    Returns:
        Tokens; None for a sample that has no ``input_ids``.

    Raises:
        ArgumentError: They have more than one dimension.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        return None
    ids = sample["input_ids"]
    if len(shape := getattr(ids, "shape", ())) > 1:
        raise ArgumentError(
            'sample["input_ids"]',
            expected="the tokens of one sample, along one dimension",
            got=f"shape {tuple(shape)}",
            remedy='Tokenize without return_tensors="pt", which makes a batch of one; or pass '
            "length=.",
        )
    return len(ids)


def weigh(batch: EffectiveBatch, function: WeighFunction) -> dict[str, float]:
    """Return the total weight of an effective batch, by term of the loss.

    Args:
        batch: The effective batch.
        function: The weight of one sample; the name of a lone term is "".

    Returns:
        Total weights.
    """
    totals: dict[str, float] = {}
    for position in range(len(batch)):
        weights = function(batch.sample(position))
        named = weights if isinstance(weights, Mapping) else {"": weights}
        for name, weight in named.items():
            totals[name] = totals.get(name, 0.0) + float(weight)
    return totals


def one_ahead(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Iterate one item ahead of what is handed out.

    While an accelerator computes on one micro-batch, the next is already collated and on its
    way there; and the last is known to be the last, also of an iterable without a length.

    Args:
        items: Any iterable. If it raises, the item before is handed out first, so that reading
            ahead loses nothing.

    Yields:
        Each item, and whether it is the last.
    """
    iterator = iter(items)
    waiting: list[T] = []
    while True:
        try:
            waiting.append(next(iterator))
        except StopIteration:
            break
        except Exception as error:
            if waiting:
                yield waiting.pop(), False
            raise error
        if len(waiting) == 2:
            yield waiting.pop(0), False  # while the consumer works, no name here holds it
    if waiting:
        yield waiting.pop(), True
