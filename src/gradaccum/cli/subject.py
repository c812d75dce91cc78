"""What a recipe and its settings are planned as."""

import numpy as np
import torch

import gradaccum as ga
from gradaccum.batch import default_length
from gradaccum.cli.targets import Build
from gradaccum.collate import collate_function
from gradaccum.errors import ArgumentError
from gradaccum.feed import Feed
from gradaccum.memory import Budget, held_bytes, needs_of, require_within, usable_bytes
from gradaccum.planner import Subject
from gradaccum.prepared import Prepared
from gradaccum.recipes.objective import Objective
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.settings import Settings


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


def subject_of(
    recipe: Recipe, objective: Objective, settings: Settings, *, parking: bool, batches: int
) -> Subject:
    """Return what is planned: a recipe's parts, and its first effective batches.

    Args:
        recipe: The recipe.
        objective: The one of its objectives that is planned.
        settings: Of the run.
        parking: Whether tensors can be parked in host memory.
        batches: How many effective batches.

    Returns:
        The subject.
    """
    length = recipe.length or default_length
    told = recipe.lengths
    if told is None and length(recipe.train[0]) is not None:
        told = np.asarray([length(recipe.train[k]) for k in range(len(recipe.train))])
    found: list[Prepared] = []
    if batches:
        order = ga.effective_batches(
            recipe.train,
            largest_batch(settings),
            lengths=recipe.lengths,
            seed=settings.seed,
            steps=batches,
        )
        found = [Prepared.of(batch, length, objective.weigh) for batch in order]
    return Subject(
        model=recipe.model,
        optimizers=[objective.optimizer],
        loss=objective.loss,
        chunked_loss=objective.chunked_loss,
        feed=Feed(collate=recipe.collate or collate_function(recipe.pad), length=length),
        batches=found,
        lengths=told,
        weigh=objective.weigh,
        parking=parking,
        sum_dtype=settings.least_sum_dtype,
        masters=settings.masters,
    )


def largest_batch(settings: Settings) -> int:
    """Return the largest effective batch of a run, which is the one that is planned.

    Args:
        settings: Of the run.

    Returns:
        Samples.
    """
    sizes = settings.sizes
    return sizes if isinstance(sizes, int) else max(sizes.values())


def told_budget(settings: Settings, device: torch.device | None) -> Budget | None:
    """Return the budget that the settings name, before anything is built.

    Args:
        settings: Of the run.
        device: None if it is not here.

    Returns:
        The budget; None for what the device has free.

    Raises:
        ArgumentError: It is more than the device has; or none is named, and the device is not here
            to ask.
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
    return None


def free_budget(recipe: Recipe, device: torch.device) -> Budget:
    """Return what a device has free for a recipe.

    Args:
        recipe: Of its model, parameters count as held.
        device: Where it is to run.

    Returns:
        The budget, in whole MiB, so that it can be named again.
    """
    held = held_bytes(recipe.model, [one.optimizer for one in recipe.trained])
    return Budget(bytes=usable_bytes(device, held=held) // 2**20 * 2**20)


def left_for(recipe: Recipe, objective: Objective, settings: Settings, budget: Budget) -> Budget:
    """Return what an objective may use beside the others.

    Args:
        recipe: The recipe.
        objective: One of its objectives.
        settings: Of the run.
        budget: For all of them.

    Returns:
        The budget without what is held while this one steps and is none of its own: the state of
        the other optimizers. Their gradient sums are not there by then.
    """
    others = [one.optimizer for one in recipe.trained if one.name != objective.name]
    if not others:
        return budget
    needs = needs_of(
        recipe.model, others, sum_dtype=settings.least_sum_dtype, masters=settings.masters
    )
    return Budget(bytes=max(1, budget.bytes - needs.optimizer_state - needs.master_weights))
