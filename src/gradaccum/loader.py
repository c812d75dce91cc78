"""Which samples make an optimizer step: effective batches of a dataset, in a seeded order."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from gradaccum.batch import EffectiveBatch, Samples
from gradaccum.dataset import Last, is_map_style, require_last
from gradaccum.errors import ArgumentError, DataError
from gradaccum.partition import by_length, num_parts, require_positive
from gradaccum.partition.cut import checked_lengths
from gradaccum.reader import Unread, in_turn, reader_of
from gradaccum.rng import data_order, require_seed


class EffectiveBatches:
    """The effective batches of a dataset, epoch after epoch.

    Each iteration covers `epochs` epochs, by default one, and the next goes on with the epoch
    behind them. One that was left early begins its epoch anew, unless a state was loaded. The
    order of an epoch depends on the seed and the epoch alone.

    Samples of a map-style dataset whose lengths are given are read when their micro-batch comes
    up, the longest first; those of any other dataset are read with their effective batch. With
    workers they are read ahead in other processes, at most one effective batch.

    Args:
        dataset: Map-style (``len`` and indexing), or any iterable of samples.
        size: Samples in an effective batch: the science, not the memory.
        lengths: ``(n,)`` tokens of each sample of a map-style dataset.
        shuffle: Whether a map-style dataset is shuffled.
        seed: Seed of the order.
        last: Whether a last, partial effective batch of an epoch makes a step (``"keep"``) or
            not (``"drop"``). One that is the only one of its epoch is kept in any case.
        epochs: Epochs in one iteration; 1 if neither this nor `steps` is given.
        steps: Optimizer steps in one iteration, over as many epochs as it takes, in place of
            `epochs`.
        workers: Processes that read samples; 0 reads them in this one. Of an `IterableDataset`
            each worker gives all samples, unless it shards itself by `get_worker_info`.
    """

    def __init__(
        self,
        *,
        dataset: Any,
        size: int,
        lengths: Sequence[int] | np.ndarray | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "keep",
        epochs: int | None = None,
        steps: int | None = None,
        workers: int = 0,
    ) -> None:
        self.size = _positive("size", size)
        if epochs is not None and steps is not None:
            raise ArgumentError(
                f"effective_batches(epochs={epochs!r}, steps={steps!r})",
                expected="one of the two",
                got="both",
                remedy="Leave one out; steps runs over as many epochs as it takes.",
            )
        self._epochs = _positive("epochs", 1 if epochs is None else epochs)
        self._steps = None if steps is None else _positive("steps", steps)
        require_seed(seed, call=f"effective_batches(seed={seed!r})")
        require_last(last, call="effective_batches")
        self._dataset, self._workers, self._last, self._seed = dataset, workers, last, seed
        self._map_style, self._shuffle = is_map_style(dataset, workers), shuffle
        if self._map_style and len(dataset) == 0:
            raise DataError(
                "effective_batches(dataset)",
                expected="at least one sample",
                got="an empty dataset",
                remedy="Check the path or the filter that made it.",
            )
        if lengths is not None and not self._map_style:
            raise ArgumentError(
                "effective_batches(iterable, lengths=...)",
                expected="lengths with a dataset that has len() and indexing",
                got=type(dataset).__name__,
                remedy="Leave lengths out; the accumulator measures samples as they come.",
            )
        self._lengths = None if lengths is None else checked_lengths(lengths, len(dataset))
        self._epoch = self._done = 0  # epochs ended, and effective batches handed out after them
        self._left: int | None = None  # of an iteration that is under way: steps, else epochs
        self._resumed = False  # a state was loaded, and not yet gone on from

    @property
    def epoch(self) -> int:
        """The epoch of the next effective batch, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Return the optimizer steps in one iteration; those left of it, from a loaded state."""
        left = self._left if self._resumed else None
        if self._steps is not None:
            return self._steps if left is None else left
        epochs = self._epochs if left is None else left
        return self._per_epoch() * epochs - (self._done if self._resumed else 0)

    def __repr__(self) -> str:
        samples = f"{len(self._dataset)} samples" if self._map_style else "an iterable"
        return f"<effective batches of {self.size} of {samples}, epoch {self._epoch}>"

    def _per_epoch(self) -> int:
        if not self._map_style:
            raise TypeError(f"object of type {type(self._dataset).__name__} has no len()")
        return max(1, num_parts(len(self._dataset), self.size, last=self._last))

    def __iter__(self) -> Iterator[EffectiveBatch]:
        """Iterate over `epochs` epochs, or over `steps` effective batches.

        Yields:
            Effective batches.
        """
        by_step = self._steps is not None
        if self._left is not None and not self._resumed:  # the last iteration was left early
            self._done, self._left = 0, None
        self._resumed = False
        if self._left is None:
            self._left = self._steps or self._epochs
        try:
            yield from self._rest_of_iteration(by_step)
        finally:
            if self._left == 0:
                self._left = None

    def _rest_of_iteration(self, by_step: bool) -> Iterator[EffectiveBatch]:
        while self._left:
            resumed, ended = self._done > 0, False
            for batch in self._one_epoch():  # counted before it is handed out, so that a state
                self._done += 1  # that is saved while it is in use goes on behind it
                self._left -= int(by_step)
                ended = self._map_style and self._done == self._per_epoch()
                if ended:
                    self._end_epoch(by_step)
                yield batch
                if self._left == 0:
                    break
            else:
                if not resumed and not ended and self._done == 0:
                    raise DataError(
                        f"epoch {self._epoch} of effective_batches(...)",
                        expected="at least one sample",
                        got="none",
                        remedy="Pass a dataset that can be iterated again, or fewer epochs.",
                    )
                if not ended:
                    self._end_epoch(by_step)

    def _end_epoch(self, by_step: bool) -> None:
        self._epoch, self._done = self._epoch + 1, 0
        if not by_step and self._left is not None:
            self._left -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return where the next iteration goes on, as plain JSON."""
        return self._identity() | {"epoch": self._epoch, "done": self._done, "left": self._left}

    def _identity(self) -> dict[str, Any]:
        """Return what must agree for a place in the order to mean the same samples."""
        return {
            "size": self.size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "last": self._last,
            "samples": len(self._dataset) if self._map_style else None,
            "by": "epochs" if self._steps is None else "steps",
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place; an iteration that was under way is continued to its end.

        Args:
            state: What `state_dict` returned.

        Raises:
            ArgumentError: It was saved with another size, seed or dataset, or is no such state.
        """
        mine = self._identity()
        if not isinstance(state, Mapping) or not {*mine, "epoch", "done", "left"} <= set(state):
            raise ArgumentError(
                "effective_batches(...).load_state_dict(state)",
                expected="what state_dict() of effective batches returned",
                got=repr(state)[:80],
                remedy="Load the state of effective batches, not of a model or an optimizer.",
            )
        for name, value in mine.items():
            if state[name] != value:
                raise ArgumentError(
                    f"load_state_dict({name}={state[name]!r})",
                    expected=f"{name}={value!r}, as these effective batches have",
                    got=repr(state[name]),
                    remedy=f"Build them with {name}={state[name]!r} to go on from this state.",
                )
        self._epoch, self._done, self._left = state["epoch"], state["done"], state["left"]
        self._resumed = True

    def _one_epoch(self) -> Iterator[EffectiveBatch]:
        if hasattr(self._dataset, "set_epoch"):  # as datasets with an order or masks of their own
            self._dataset.set_epoch(self._epoch)
        return self._by_index() if self._map_style else self._in_turn()

    def _by_index(self) -> Iterator[EffectiveBatch]:
        total = len(self._dataset)
        order = (
            data_order(total, seed=self._seed, epoch=self._epoch)
            if self._shuffle
            else np.arange(total)
        )
        starts = [k * self.size for k in range(self._done, self._per_epoch())]
        batches = [order[start : start + self.size] for start in starts]
        if self._lengths is not None:  # in the order in which they will be asked for
            batches = [batch[by_length(self._lengths[batch])] for batch in batches]
        reader = reader_of(
            self._dataset,
            batches,
            workers=self._workers,
            lazy=self._lengths is not None,
            generator=self._generator(),
        )
        for indices in batches:
            if self._lengths is None:
                yield Samples(reader.read(len(indices)))
            else:
                yield Unread(reader, indices, self._lengths)

    def _generator(self) -> torch.Generator:
        """Return what seeds the workers, so that they leave torch's global generator alone."""
        seed = np.random.SeedSequence([self._seed, self._epoch]).generate_state(1)[0]
        return torch.Generator().manual_seed(int(seed))

    def _in_turn(self) -> Iterator[EffectiveBatch]:
        samples = in_turn(
            self._dataset, size=self.size, workers=self._workers, generator=self._generator()
        )
        for _ in range(self._done * self.size):  # where a saved state had come to
            next(samples, None)
        first = self._done == 0
        while batch := list(islice(samples, self.size)):
            if len(batch) < self.size and self._last == "drop" and not first:
                return
            yield Samples(batch)
            first = False


def _positive(name: str, value: object) -> int:
    return require_positive(name, value, call=f"effective_batches({name}={value!r})")
