"""Plan a run: nothing is trained, and nothing but what is asked for is written."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from gradaccum.cli.clock import seconds_per_flop
from gradaccum.cli.folder import choose_folder, write_json
from gradaccum.cli.subject import (
    built,
    free_budget,
    largest_batch,
    left_for,
    subject_of,
    told_budget,
)
from gradaccum.cli.targets import Build
from gradaccum.errors import ArgumentError
from gradaccum.integrations.transformers import masks_as_in_earnest
from gradaccum.planner import Plan, plan
from gradaccum.recipes.settings import Settings
from gradaccum.report.frontier import as_json, caps_table, draw, frontier_tables, parts_table
from gradaccum.units import binary

_BATCHES = 4  # effective batches that a plan is averaged over


def run_plan(build: Build, settings: Settings, out: Path | None) -> None:
    """Predict what fits and what it costs; print it, and leave a folder.

    Args:
        build: Builds the recipe.
        settings: Of the run that is planned.
        out: The folder, if the user named one.
    """
    console = Console()
    folder = choose_folder(out, settings.recipe, under="plans")
    device = _device(settings)
    there = _is_there(device)
    budget = told_budget(settings, device if there else None)
    with console.status("preparing data and model ..."):
        recipe = built(build, settings.model_copy(update={"device": "cpu"}))
    budget = budget or free_budget(recipe, device)
    every = {}
    for objective in recipe.trained:
        subject = subject_of(
            recipe, objective, settings, parking=device.type != "cpu", batches=_BATCHES
        )
        with console.status("predicting ..."), masks_as_in_earnest():
            clock = partial(seconds_per_flop, subject, device) if there else None
            every[objective.name] = plan(
                subject, left_for(recipe, objective, settings, budget), clock=clock
            )
    lengths = _shown_lengths(subject.lengths)
    for name, made in every.items():
        heading = f"{settings.recipe} {name}".strip()
        _print(made, f"{heading} on {device}", settings, lengths, console)
    if not there:
        console.print(
            f"There is no {device} here: time is told in floating-point operations. The way to "
            "the host and back, of what is parked, is not in it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    told = {name: as_json(made, lengths) for name, made in every.items()}
    write_json(folder / "plan.json", {"recipe": settings.recipe} | told.get("", told))
    try:
        for name, made in every.items():
            draw(made, folder / f"frontier{name and '-'}{name}.png")
    except ModuleNotFoundError:
        console.print("No picture, since matplotlib is not installed.")
    console.print(Text(f"plan: {folder}"), soft_wrap=True)


def _print(
    made: Plan, heading: str, settings: Settings, lengths: list[int], console: Console
) -> None:
    """Print a plan."""
    batch = largest_batch(settings)
    which = f" (the largest of {told})" if isinstance(told := settings.effective_batch, str) else ""
    console.print(
        Text(
            f"{heading}, {binary(made.budget.bytes)}, "
            f"effective batch {batch:,}{which}: "
            f"{made.chosen.micro_batches:.1f} accumulation steps, "
            f"{100 * made.chosen.real_share:.1f}% of the computed tokens real\n"
        ),
        soft_wrap=True,
    )
    for table in (parts_table(made), caps_table(made, lengths), *frontier_tables(made)):
        console.print(table)
        console.print()
    console.print(Text(made.reason), soft_wrap=True)


def _device(settings: Settings) -> torch.device:
    if settings.device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(settings.device)
    except RuntimeError as error:
        raise ArgumentError(
            f"device {settings.device!r}",
            expected="the name of a device, here or elsewhere",
            got=repr(settings.device),
            remedy='Say "cpu" or "cuda".',
        ) from error


def _is_there(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        return False
    return True


def _shown_lengths(lengths: np.ndarray | None) -> list[int]:
    """Return a few lengths between the median and the longest; 1 where samples have none."""
    if lengths is None:
        return [1]
    return sorted({int(np.quantile(lengths, q, method="higher")) for q in (0.25, 0.5, 0.9, 1.0)})
