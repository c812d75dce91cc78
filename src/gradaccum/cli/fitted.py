"""A recipe that fits into the memory there is."""

from dataclasses import replace

from gradaccum.cli.subject import free_budget, subject_of
from gradaccum.errors import PredictionError
from gradaccum.integrations.transformers import masks_as_in_earnest
from gradaccum.levers import Levers, pulled
from gradaccum.memory import Budget
from gradaccum.planner import least_levers
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.settings import Settings


def sized(settings: Settings, recipe: Recipe) -> Settings:
    """Say how much memory is free, where nothing was said: so the run can be repeated.

    Args:
        settings: Of the run.
        recipe: Its model is on the device.

    Returns:
        Settings that say how micro-batches are sized.
    """
    if settings.memory or settings.micro_batch_size or settings.micro_batch_tokens:
        return settings
    free = free_budget(recipe, next(recipe.model.parameters()).device)
    return settings.model_copy(update={"memory": f"{free.bytes // 2**20}MiB"})


def with_levers(recipe: Recipe, settings: Settings) -> tuple[Recipe, Levers]:
    """Pull as few levers as let the longest sample fit into memory, if there is a budget.

    Args:
        recipe: Its model may be changed.
        settings: Of the run.

    Returns:
        The recipe with the loss that is to be taken, and what was pulled.
    """
    if settings.memory is None or len(recipe.train) == 0:
        return recipe, Levers()
    device = next(recipe.model.parameters()).device
    subject = subject_of(recipe, settings, parking=device.type != "cpu", batches=0)
    longest = 0 if subject.lengths is None else int(subject.lengths.argmax())
    try:
        with masks_as_in_earnest():
            levers = least_levers(subject, Budget.of(settings.memory), recipe.train[longest])
    except PredictionError:  # it cannot be told beforehand; probes will tell
        return recipe, Levers()
    loss = pulled(levers, recipe.model, recipe.loss, recipe.chunked_loss)
    return replace(recipe, loss=loss), levers
