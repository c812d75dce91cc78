"""The objectives of a recipe, side by side: an accumulator for each, on the same samples."""

from collections.abc import Mapping
from typing import Any

import gradaccum as ga
from gradaccum.cli.subject import left_for
from gradaccum.memory import Budget
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.schedule import scheduler
from gradaccum.recipes.settings import Settings


def accumulators_of(recipe: Recipe, settings: Settings, *, steps: int) -> dict[str, ga.Accumulator]:
    """Build an accumulator for each objective.

    Args:
        recipe: Its parts.
        settings: Of the run.
        steps: Effective batches of the run.

    Returns:
        The accumulators by name, in the order in which they step.
    """
    told = None if settings.memory is None else Budget.of(settings.memory)
    return {
        objective.name: ga.accumulator(
            recipe.model,
            objective.optimizer,
            objective.loss,
            scheduler=scheduler(objective.optimizer, settings, steps=steps),
            max_grad_norm=settings.max_grad_norm,
            memory=None if told is None else left_for(recipe, objective, settings, told),
            micro_batch_size=settings.micro_batch_size,
            micro_batch_tokens=settings.micro_batch_tokens,
            collate=recipe.collate,
            pad=recipe.pad,
            length=recipe.length,
            weigh=objective.weigh,
            ema=objective.ema,
            sum_dtype=settings.least_sum_dtype,
            master_weights=settings.master_weights,
            stochastic_rounding=settings.stochastic_rounding,
            verify="first" if recipe.coupled is None else "never",
        )
        for objective in recipe.trained
    }


def counters_of(accumulators: Mapping[str, ga.Accumulator]) -> dict[str, Any]:
    """Return the counters as plain JSON, by name where there are several objectives."""
    by_name = {name: one.counters.as_dict() for name, one in accumulators.items()}
    return by_name.get("", by_name)
