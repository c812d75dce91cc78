"""What a recipe and its settings are planned as."""

import numpy as np
import torch

import gradaccum as ga
from gradaccum.batch import default_length
from gradaccum.cli.targets import Build
from gradaccum.collate import collate_function
from gradaccum.errors import ArgumentError
from gradaccum.feed import Feed
from gradaccum.memory import Budget, require_within, usable_bytes
from gradaccum.planner import Subject
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.settings import Settings

_BATCHES = 4  # effective batches that a plan is averaged over


def built(build: Build, settings: Settings) -> Recipe:
    """Build a recipe, and see that it is one.

    Args:
        build: Builds it.
        settings: Of the run.

    Returns:
        The recipe.

    Raises:
        ArgumentError: The factory returned something else.
    """
    recipe = build(settings)
    if not isinstance(recipe, Recipe):
        raise ArgumentError(
            settings.recipe,
            expected="a factory that returns a gradaccum.recipes.recipe.Recipe",
            got=type(recipe).__name__,
            remedy="Return Recipe(model=..., loss=..., optimizer=..., train=..., held_out=...).",
        )
    return recipe


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
    lengths = lengths_of(recipe)
    return Subject(
        model=recipe.model,
        optimizers=[recipe.optimizer],
        loss=recipe.loss,
        chunked_loss=recipe.chunked_loss,
        feed=Feed(
            collate=recipe.collate or collate_function(recipe.pad),
            length=recipe.length or default_length,
        ),
        batches=list(batches),
        longest=1 if lengths is None else int(lengths.max()),
        weigh=recipe.weigh,
        parking=parking,
    )


def lengths_of(recipe: Recipe) -> np.ndarray | None:
    """Return the lengths of a recipe's training samples.

    Args:
        recipe: Its samples are read where their lengths are not told.

    Returns:
        ``(n,)`` tokens; None where samples have none.
    """
    if recipe.lengths is not None:
        return recipe.lengths
    length = recipe.length or default_length
    if length(recipe.train[0]) is None:
        return None
    return np.asarray([length(recipe.train[k]) for k in range(len(recipe.train))])


def budget_of(settings: Settings, recipe: Recipe, device: torch.device | None) -> Budget:
    """Return the budget that the settings name, or else what a device has free.

    Args:
        settings: Of the run.
        recipe: Of its model, parameters count as held.
        device: None if it is not here.

    Returns:
        The budget; in whole MiB where none is named, so that it can be named again.

    Raises:
        ArgumentError: No budget is named, and the device is not here to ask.
    """
    if settings.memory is not None:
        budget = Budget.of(settings.memory)
        if device is not None:
            require_within(budget, device, call=f"--memory {settings.memory}")
        return budget
    if device is None:
        raise ArgumentError(
            f"plan {settings.recipe} --device {settings.device}",
            expected="--memory, since the device is not here to be asked",
            got="none",
            remedy="Pass what the device has, --memory 24GiB for example.",
        )
    held = sum(p.numel() * p.element_size() for p in recipe.model.parameters())
    return Budget(bytes=usable_bytes(device, held=held) // 2**20 * 2**20)
