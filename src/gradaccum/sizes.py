"""How large each effective batch is: one number, or sizes that change over a run."""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal, get_args

import numpy as np

from gradaccum.choices import require_one_of
from gradaccum.errors import ArgumentError

SizeBy = Literal["steps", "samples", "tokens"]

LrRule = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What was handed out since the beginning of training, in whole effective batches.

    Args:
        steps: Effective batches.
        samples: Their samples.
        tokens: The summed lengths of these; 0 where no lengths are given.
    """

    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, samples: int, tokens: int = 0) -> "Progress":
        """Return the counts after one more effective batch."""
        return Progress(
            steps=self.steps + 1, samples=self.samples + samples, tokens=self.tokens + tokens
        )


Size = int | Mapping[int, int] | Callable[[Progress], int]
"""A size, sizes by the counts from which they hold, or a pure function of the progress."""


class SizeChangedWarning(UserWarning):
    """A run goes on with another effective batch size than it was stopped with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The size of each effective batch of a run, and how the learning rate follows it.

    Args:
        table: Counts, rising from 0, and the size from each on; empty where there is a function.
        by: What the counts are of.
        function: From the progress to a size.
        lr_rule: How the learning rate follows.
    """

    table: tuple[tuple[int, int], ...] = ()
    by: SizeBy = "steps"
    function: Callable[[Progress], int] | None = None
    lr_rule: LrRule = "none"

    @classmethod
    def of(cls, size: Size, *, by: SizeBy, lr_rule: LrRule, lengths_known: bool) -> "Sizes":
        """Build sizes from what a user says.

        Args:
            size: A number, a mapping or a function.
            by: What the keys of a mapping count.
            lr_rule: How the learning rate follows.
            lengths_known: Whether tokens can be counted.

        Returns:
            The sizes.

        Raises:
            ArgumentError: They are no sizes, or `by` does not go with them.
        """
        require_one_of("size_by", by, get_args(SizeBy), call="effective_batches")
        require_one_of("lr_rule", lr_rule, get_args(LrRule), call="effective_batches")
        if isinstance(size, Mapping):
            if by == "tokens" and not lengths_known:
                raise ArgumentError(
                    'effective_batches(size_by="tokens")',
                    expected="lengths=... beside it",
                    got="none, so that tokens cannot be counted beforehand",
                    remedy='Pass the lengths of a dataset with len(), or size_by="samples".',
                )
            return cls(table=_checked_table(size), by=by, lr_rule=lr_rule)
        if by != "steps":
            raise ArgumentError(
                f"effective_batches(size_by={by!r})",
                expected="a mapping such as {0: 64, 1000: 256}, whose keys it is about",
                got=f"size={'a function' if callable(size) else repr(size)}",
                remedy="Leave size_by out; a function sees steps, samples and tokens.",
            )
        if callable(size):
            sizes = cls(function=size, lr_rule=lr_rule)
            sizes.size_at(Progress())  # refuses one that returns no size, before any work
            return sizes
        if not _is_whole(size, least=1):
            raise ArgumentError(
                f"effective_batches(size={size!r})",
                expected="a whole number of samples, at least 1; or a mapping such as "
                "{0: 64, 1000: 256}; or a function of the progress",
                got=repr(size),
                remedy="Pass size=1 for the smallest.",
            )
        return cls(table=((0, int(size)),), lr_rule=lr_rule)

    def size_at(self, progress: Progress) -> int:
        """Return the size of the effective batch that begins here.

        Args:
            progress: What was handed out before it.

        Returns:
            Samples.

        Raises:
            ArgumentError: The user's function returned no size.
        """
        if self.function is None:
            count = getattr(progress, self.by)
            return self.table[bisect_right(self.table, count, key=lambda entry: entry[0]) - 1][1]
        size = self.function(progress)
        if not _is_whole(size, least=1):
            raise ArgumentError(
                f"effective_batches(size=...): size({progress})",
                expected="a whole number of samples, at least 1",
                got=repr(size),
                remedy="Return one for every progress, round(...) of what is computed.",
            )
        return int(size)

    def settled(self, progress: Progress) -> bool:
        """Return whether the size that holds here holds ever after."""
        return self.function is None and getattr(progress, self.by) >= self.table[-1][0]

    def lr_scale(self, size: int) -> float:
        """Return what the learning rate is multiplied by, for one size.

        Args:
            size: In force.

        Returns:
            The factor; 1 for the size that training begins with, which the rate was chosen for.
        """
        if self.lr_rule == "none":
            return 1.0
        ratio = size / self.size_at(Progress())
        return ratio if self.lr_rule == "linear" else sqrt(ratio)

    def __str__(self) -> str:
        if self.function is not None:
            return "a function"
        (_, first), *later = self.table
        rest = "".join(f",{count}:{size}" for count, size in later)
        return f"{first}{rest} by {self.by}" if rest else str(first)


def parsed_sizes(text: int | str) -> int | dict[int, int]:
    """Read the spelling of the command line: ``"64"``, or ``"64,1000:256"``.

    >>> parsed_sizes("64,1000:256")
    {0: 64, 1000: 256}

    Args:
        text: A size; or the first one, then pairs of optimizer steps and the size after them.

    Returns:
        A number, or a mapping by steps.

    Raises:
        ArgumentError: It is spelled in another way.
    """
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*:\s*\d+\s*)*", str(text)):
        first, *later = str(text).split(",")
        pairs = [("0", first), *(part.split(":") for part in later)]
        sizes = {int(step): int(size) for step, size in pairs}
        rising = len(sizes) == len(pairs) and list(sizes) == sorted(sizes)
        if rising and min(sizes.values()) >= 1:
            return sizes if later else sizes[0]
    raise ArgumentError(
        f"effective_batch = {text!r}",
        expected='a number of samples, at least 1; or "64,1000:256", which is 64 at first and 256 '
        "after 1000 optimizer steps; steps must rise",
        got=repr(text),
        remedy="Give the first size by itself, then step:size for each later one.",
    )


def _checked_table(sizes: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the entries of a mapping, sorted."""
    for count, size in sizes.items():
        if not _is_whole(count, least=0) or not _is_whole(size, least=1):
            raise ArgumentError(
                f"effective_batches(size={{{count!r}: {size!r}}})",
                expected="whole counts of at least 0, and whole sizes of at least 1",
                got=f"{count!r}: {size!r}",
                remedy="Pass for example size={0: 64, 1000: 256}.",
            )
    if 0 not in sizes:
        raise ArgumentError(
            "effective_batches(size={...})",
            expected="the key 0, for the size that training begins with",
            got=f"a first key of {min(sizes)}" if sizes else "an empty mapping",
            remedy="Pass for example size={0: 64, 1000: 256}.",
        )
    return tuple(sorted((int(count), int(size)) for count, size in sizes.items()))


def _is_whole(value: object, *, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return bool(value >= least)
