"""What a recipe and its settings are planned as."""

import gradaccum as ga
from gradaccum.collate import collate_function
from gradaccum.feed import Feed
from gradaccum.memory import Budget, usable_bytes
from gradaccum.planner import Subject
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.settings import Settings

_BATCHES = 4  # effective batches that a plan is averaged over


def subject_of(recipe: Recipe, settings: Settings, *, parking: bool) -> Subject:
    """Return what is planned: the recipe's parts, and its first effective batches.

    Args:
        recipe: The recipe.
        settings: Of the run.
        parking: Whether tensors can be parked in host memory.

    Returns:
        The subject.
    """
    batches = ga.effective_batches(
        recipe.train,
        settings.effective_batch,
        lengths=recipe.lengths,
        seed=settings.seed,
        steps=_BATCHES,
    )
    return Subject(
        model=recipe.model,
        optimizers=[recipe.optimizer],
        loss=recipe.loss,
        chunked_loss=recipe.chunked_loss,
        feed=Feed(collate=recipe.collate or collate_function(recipe.pad)),
        batches=list(batches),
        longest=1 if recipe.lengths is None else int(recipe.lengths.max()),
        parking=parking,
    )


def budget_of(settings: Settings, recipe: Recipe) -> Budget:
    """Return the budget that the settings name, or else what the model's device has free.

    Args:
        settings: Of the run.
        recipe: Its model is on the device.

    Returns:
        The budget; in whole MiB where none is named, so that it can be named again.
    """
    if settings.memory is not None:
        return Budget.of(settings.memory)
    parameters = list(recipe.model.parameters())
    held = sum(p.numel() * p.element_size() for p in parameters)
    return Budget(bytes=usable_bytes(parameters[0].device, held=held) // 2**20 * 2**20)
