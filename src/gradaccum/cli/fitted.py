"""A recipe that fits into the memory there is."""

from dataclasses import fields, replace

from gradaccum.cli.subject import free_budget, left_for, subject_of
from gradaccum.errors import PredictionError
from gradaccum.integrations.transformers import masks_as_in_earnest
from gradaccum.levers import Levers, pulled
from gradaccum.memory import Budget
from gradaccum.planner import least_levers
from gradaccum.recipes.objective import Objective
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.settings import Settings

_NAMES = tuple(field.name for field in fields(Levers))


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
    with masks_as_in_earnest():
        found = [_least(recipe, objective, settings) for objective in recipe.trained]
    # Blocks are the model's: what one objective needs is pulled for all.
    levers = Levers(**{name: any(getattr(one, name) for one in found) for name in _NAMES})
    losses = [pulled(levers, recipe.model, o.loss, o.chunked_loss) for o in recipe.trained]
    each = [replace(o, loss=loss) for o, loss in zip(recipe.trained, losses, strict=True)]
    return recipe.with_objectives(each), levers


def _least(recipe: Recipe, objective: Objective, settings: Settings) -> Levers:
    """Return as few levers as let the longest sample fit for one objective."""
    parking = next(recipe.model.parameters()).device.type != "cpu"
    subject = subject_of(recipe, objective, settings, parking=parking, batches=0)
    longest = 0 if subject.lengths is None else int(subject.lengths.argmax())
    budget = left_for(recipe, objective, settings, Budget.of(settings.memory or ""))
    try:
        return least_levers(subject, budget, recipe.train[longest])
    except PredictionError:  # it cannot be told beforehand; probes will tell
        return Levers()
