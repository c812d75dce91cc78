"""The course of training through a dataset: where it is, and which samples come next."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from gradaccum.dataset import Last, MapStyle
from gradaccum.partition import num_parts
from gradaccum.rng import data_order
from gradaccum.sizes import Progress, Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place between two effective batches.

    Args:
        epoch: Epochs that have ended.
        begun: What was handed out when this epoch began.
        now: What was handed out so far.
    """

    epoch: int = 0
    begun: Progress = field(default_factory=Progress)
    now: Progress = field(default_factory=Progress)

    @property
    def samples(self) -> int:
        """Samples of this epoch that were handed out: where the next one lies in its order."""
        return self.now.samples - self.begun.samples

    def after(self, samples: int, tokens: int = 0) -> "Place":
        """Return the place behind one more effective batch."""
        return replace(self, now=self.now.after(samples, tokens))

    def next_epoch(self) -> "Place":
        """Return the beginning of the next epoch."""
        return Place(epoch=self.epoch + 1, begun=self.now, now=self.now)

    def anew(self) -> "Place":
        """Return the beginning of this epoch."""
        return replace(self, now=self.begun)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Place":
        """Return the place that `as_dict` returned."""
        begun, now = (Progress(**values[name]) for name in ("begun", "now"))
        return cls(epoch=values["epoch"], begun=begun, now=now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One effective batch, as a part of the order of its epoch.

    Args:
        start: Where it begins.
        stop: Where it ends.
        size: In force when it began; the last of an epoch may have fewer samples.
        after: The place behind it; behind the last of an epoch, the beginning of the next.
    """

    start: int
    stop: int
    size: int
    after: Place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Course:
    """The effective batches of a map-style dataset, as a function of the place.

    Args:
        dataset: Its length counts.
        sizes: Of effective batches.
        seed: Seed of the order.
        shuffle: Whether samples are shuffled.
        last: Whether a last, partial effective batch of an epoch is kept. The only one of an
            epoch is kept in any case.
        lengths: ``(n,)`` tokens of each sample, if known.
    """

    dataset: MapStyle
    sizes: Sizes
    seed: int
    shuffle: bool
    last: Last
    lengths: np.ndarray | None

    def order(self, epoch: int) -> np.ndarray:
        """Return the ``(n,)`` indices of the samples of an epoch."""
        total = len(self.dataset)
        return data_order(total, seed=self.seed, epoch=epoch) if self.shuffle else np.arange(total)

    def spans(self, place: Place) -> list[Span]:
        """Cut what is left of an epoch into effective batches.

        Args:
            place: Where to go on.

        Returns:
            The effective batches; none where no more than a dropped rest is left.
        """
        found: list[Span] = []
        total = len(self.dataset)
        lengths = None if self.lengths is None else self.lengths[self.order(place.epoch)]
        while place.samples < total:
            start, size = place.samples, self.sizes.size_at(place.now)
            if start and start + size > total and self.last == "drop":
                break
            stop = min(start + size, total)
            tokens = 0 if lengths is None else int(lengths[start:stop].sum())
            place = place.after(stop - start, tokens)
            found.append(Span(start=start, stop=stop, size=size, after=place))
        if found:
            found[-1] = replace(found[-1], after=place.next_epoch())
        return found

    def num_steps(self, place: Place, epochs: int) -> int:
        """Return how many effective batches some epochs have.

        Args:
            place: Where to go on, before at least one more effective batch of its epoch.
            epochs: Epochs to the end, the one of the place included.

        Returns:
            Effective batches.
        """
        steps = 0
        while epochs and not self.sizes.settled(place.now):
            found = self.spans(place)
            steps, place, epochs = steps + len(found), found[-1].after, epochs - 1
        if epochs:  # the size moves no more, so that nothing need be tried
            total, size = len(self.dataset), self.sizes.size_at(place.now)
            for times, samples in ((1, total - place.samples), (epochs - 1, total)):
                steps += times * max(1, num_parts(samples, size, last=self.last))
        return steps
