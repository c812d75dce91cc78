"""A look at how far training is: the loss of held-out samples, or a score of the recipe's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import gradaccum as ga
from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is looked at.

    Args:
        name: On the screen.
        key: In ``result.json``.
        measure: Returns it, the lower the better.
        baseline: What to compare it with, and its name.
    """

    name: str
    key: str
    measure: Callable[[], float]
    baseline: tuple[str, float] | None

    def line(self, step: int, value: float) -> str:
        """Return what was measured after an optimizer step, as a line on the screen."""
        text = f"optimizer step {step:>5}  {self.name} {value:.4f}"
        if self.baseline is None:
            return text
        name, compared = self.baseline
        return f"{text}  ({name} {compared:.4f})"

    def result(self, first: float, last: float) -> dict[str, Any]:
        """Return what was measured at first and at last, as plain JSON."""
        measured = {"first": _finite(first), "last": _finite(last)}
        return {self.key: measured} | ({"baseline": dict([self.baseline])} if self.baseline else {})


def look_of(recipe: Recipe, settings: Settings, accumulators: Mapping[str, ga.Accumulator]) -> Look:
    """Return what is looked at: the score of a recipe, if it has one.

    Args:
        recipe: The recipe.
        settings: Of the run.
        accumulators: By name of the objective.

    Returns:
        The look.

    Raises:
        ArgumentError: There is no score, and no sample is held out.
    """
    if recipe.score is not None:
        name, measure = recipe.score
        return Look(name=name, key="score", measure=measure, baseline=recipe.baseline)
    if len(recipe.held_out) == 0:
        raise ArgumentError(
            f"{settings.recipe}: Recipe(held_out=...)",
            expected="at least one sample to evaluate",
            got="none",
            remedy="Hold some samples out of training.",
        )
    (accumulator,) = accumulators.values()  # several losses come with a score
    return Look(
        name="held-out loss",
        key="held_out_loss",
        measure=partial(_held_out_loss, accumulator, recipe, settings),
        baseline=recipe.baseline,
    )


def _held_out_loss(accumulator: ga.Accumulator, recipe: Recipe, settings: Settings) -> float:
    found = accumulator.evaluate(list(recipe.held_out))
    if found.weight == 0:
        raise DataError(
            f"train {settings.recipe}",
            expected="held-out samples with something to predict",
            got=f"{found.samples} of them, in which no token carries weight",
            remedy="Give more data, so that more of it is held out; or another --seed.",
        )
    return found.loss


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None  # JSON has no NaN
