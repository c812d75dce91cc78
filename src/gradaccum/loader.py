"""Which samples make an optimizer step: effective batches of a dataset, in a seeded order."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import numpy as np
import torch

from gradaccum.batch import EffectiveBatch, Samples
from gradaccum.choices import require_one_of
from gradaccum.course import Course, Place
from gradaccum.dataset import Last, is_map_style, known_lengths
from gradaccum.errors import ArgumentError, DataError
from gradaccum.partition import by_length, require_positive
from gradaccum.reader import Unread, in_turn, reader_of
from gradaccum.rng import require_seed
from gradaccum.sizes import LrRule, Size, SizeBy, SizeChangedWarning, Sizes


class EffectiveBatches:
    """The effective batches of a dataset, epoch after epoch.

    Each iteration covers `epochs` epochs, by default one, and the next goes on with the epoch
    behind them. One that was left early begins its epoch anew, and counts as it did then, unless a
    state was loaded. The order of an epoch depends on the seed and the epoch alone.

    An effective batch has the size in force at its start, whatever comes within it. The last of an
    epoch has what is left of the epoch.

    Samples of a map-style dataset whose lengths are given are read when their micro-batch comes
    up, the longest first; those of any other dataset are read with their effective batch. With
    workers they are read ahead in other processes, at most one effective batch.

    Args:
        dataset: Map-style (``len`` and indexing), or any iterable of samples.
        size: Samples in an effective batch: the science, not the memory. A number; a mapping such
            as ``{0: 64, 1000: 256}``; or a function of the `Progress`, which must depend on
            nothing else, as it is asked beforehand and again: for the length, and for what
            workers read ahead.
        size_by: What the keys of a mapping count from the beginning of training: ``"steps"``
            (effective batches), ``"samples"`` or ``"tokens"`` that were handed out.
        lr_rule: How `EffectiveBatch.lr_scale` follows the size: ``"none"`` leaves it at 1,
            ``"linear"`` is the ratio to the first size of all, ``"sqrt"`` the root of that.
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
        size: Size,
        size_by: SizeBy = "steps",
        lr_rule: LrRule = "none",
        lengths: Sequence[int] | np.ndarray | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "keep",
        epochs: int | None = None,
        steps: int | None = None,
        workers: int = 0,
    ) -> None:
        self._sizes = Sizes.of(size, by=size_by, lr_rule=lr_rule, lengths_known=lengths is not None)
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
        require_one_of("last", last, get_args(Last), call="effective_batches")
        self._dataset, self._workers, self._last, self._seed = dataset, workers, last, seed
        self._map_style, self._shuffle = is_map_style(dataset, workers), shuffle
        self._lengths = known_lengths(lengths, dataset, map_style=self._map_style)
        self._course = Course(
            dataset=dataset,
            sizes=self._sizes,
            seed=seed,
            shuffle=shuffle,
            last=last,
            lengths=self._lengths,
        )
        self._place = Place()
        self._ahead = self.size  # the first size of this epoch: so far workers read ahead
        self._left: int | None = None  # of an iteration that is under way: steps, else epochs
        self._resumed = False  # a state was loaded, and not yet gone on from
        self._began: tuple[Place, int] | None = None  # where the one under way did, with its `left`

    @property
    def epoch(self) -> int:
        """The epoch of the next effective batch, from 0."""
        return self._place.epoch

    @property
    def size(self) -> int:
        """The size of the next effective batch; the last of an epoch may have fewer samples."""
        return self._sizes.size_at(self._place.now)

    def __len__(self) -> int:
        """Return the optimizer steps in one iteration; those left of it, from a loaded state."""
        place, left = self._began or self._next_iteration()
        if self._steps is not None:
            return left
        if not self._map_style:
            raise TypeError(f"object of type {type(self._dataset).__name__} has no len()")
        return self._course.num_steps(place, left)

    def __repr__(self) -> str:
        samples = f"{len(self._dataset)} samples" if self._map_style else "an iterable"
        return f"<effective batches of {self.size} of {samples}, epoch {self.epoch}>"

    def _next_iteration(self) -> tuple[Place, int]:
        """Return where the next iteration begins, and how much it covers."""
        whole = self._steps or self._epochs
        if self._left is None:
            return self._place, whole
        if self._resumed:
            return self._place, self._left
        return self._place.anew(), whole  # the last iteration was left early

    def __iter__(self) -> Iterator[EffectiveBatch]:
        """Iterate over `epochs` epochs, or over `steps` effective batches.

        Yields:
            Effective batches.
        """
        self._began = self._next_iteration()
        self._place, self._left = self._began
        self._resumed = False
        try:
            yield from self._rest_of_iteration()
        finally:
            self._began = None
            if self._left == 0:
                self._left = None

    def _rest_of_iteration(self) -> Iterator[EffectiveBatch]:
        while self._left:
            epoch = self.epoch
            for batch, size, after in self._one_epoch():
                self._move(after)  # first: a state that is saved while it is in use is behind it
                batch.lr_scale = self._sizes.lr_scale(size)
                yield batch
                if self._left == 0:
                    break
            else:
                if self.epoch > epoch:
                    continue  # the last of an epoch was known to be the last
                if self._place.samples == 0:
                    raise DataError(
                        f"epoch {epoch} of effective_batches(...)",
                        expected="at least one sample",
                        got="none",
                        remedy="Pass a dataset that can be iterated again, or fewer epochs.",
                    )
                self._move(self._place.next_epoch())

    def _move(self, place: Place) -> None:
        """Go on to a place; of the iteration that is under way less is left."""
        before, self._place = self._place, place
        if self._left is not None and self._steps is not None:
            self._left -= place.now.steps - before.now.steps
        elif self._left is not None:
            self._left -= place.epoch - before.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where the next iteration goes on, as plain JSON."""
        return self._identity() | {
            "size": str(self._sizes),
            "place": self._place.as_dict(),
            "ahead": self._ahead,
            "left": self._left,
        }

    def _identity(self) -> dict[str, Any]:
        """Return what must agree for a place in the order to mean the same samples."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "last": self._last,
            "samples": len(self._dataset) if self._map_style else None,
            "by": "epochs" if self._steps is None else "steps",
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place; an iteration that was under way is continued to its end.

        With another size, training goes on from the next sample that was not handed out, and a
        `SizeChangedWarning` says so; an epoch that had ended stays ended. Functions are not saved,
        so one is taken for another.

        Args:
            state: What `state_dict` returned.

        Raises:
            ArgumentError: It was saved with another seed or dataset, or is no such state.
        """
        mine = self._identity()
        known = {*mine, "size", "place", "ahead", "left"}
        if not isinstance(state, Mapping) or not known <= set(state):
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
        place = Place.from_dict(state["place"])
        if self._sizes.by == "tokens" and place.now.samples and not place.now.tokens:
            raise ArgumentError(
                "effective_batches(size_by='tokens').load_state_dict(state)",
                expected="a state of effective batches with lengths, which count tokens",
                got=f"{place.now.samples} samples of unknown length",
                remedy='Go on with size_by="samples".',
            )
        if state["size"] != (size := str(self._sizes)):
            warnings.warn(
                f"The effective batch size was {state['size']} when this state was saved, and is "
                f"{size} from the next unseen sample of epoch {place.epoch} on.",
                SizeChangedWarning,
                stacklevel=2,
            )
        self._place, self._left, self._ahead = place, state["left"], state["ahead"]
        self._began, self._resumed = None, True
        if self._map_style and not self._course.spans(place):  # too few are left for the new size
            self._move(place.next_epoch())

    def _one_epoch(self) -> Iterator[tuple[EffectiveBatch, int, Place]]:
        """Iterate over what is left of an epoch, with the size in force and the place behind."""
        if hasattr(self._dataset, "set_epoch"):  # as datasets with an order or masks of their own
            self._dataset.set_epoch(self.epoch)
        return self._by_index() if self._map_style else self._in_turn()

    def _by_index(self) -> Iterator[tuple[EffectiveBatch, int, Place]]:
        order, spans = self._course.order(self.epoch), self._course.spans(self._place)
        batches = [order[span.start : span.stop] for span in spans]
        if self._lengths is not None:  # in the order in which they will be asked for
            batches = [batch[by_length(self._lengths[batch])] for batch in batches]
        reader = reader_of(
            self._dataset,
            batches,
            workers=self._workers,
            lazy=self._lengths is not None,
            generator=self._generator(),
        )
        for indices, span in zip(batches, spans, strict=True):
            if self._lengths is None:
                yield Samples(reader.read(len(indices)), indices), span.size, span.after
            else:
                yield Unread(reader, indices, self._lengths), span.size, span.after

    def _generator(self) -> torch.Generator:
        """Return what seeds the workers, so that they leave torch's global generator alone."""
        seed = np.random.SeedSequence([self._seed, self.epoch]).generate_state(1)[0]
        return torch.Generator().manual_seed(int(seed))

    def _in_turn(self) -> Iterator[tuple[EffectiveBatch, int, Place]]:
        place = self._place
        if place.samples == 0:  # else as before: several workers share samples by it
            self._ahead = self._sizes.size_at(place.now)
        samples = in_turn(
            self._dataset, size=self._ahead, workers=self._workers, generator=self._generator()
        )
        for _ in range(place.samples):  # where a saved state had come to
            next(samples, None)
        while batch := list(islice(samples, size := self._sizes.size_at(place.now))):
            if len(batch) < size and self._last == "drop" and place.samples:
                return
            place = place.after(len(batch))
            yield Samples(batch), size, place


def _positive(name: str, value: object) -> int:
    return require_positive(name, value, call=f"effective_batches({name}={value!r})")
