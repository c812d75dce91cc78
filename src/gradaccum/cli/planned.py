"""Plan a run: nothing is trained, and nothing but what is asked for is written."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from gradaccum.batch import weigh
from gradaccum.cli.folder import choose_folder, write_json
from gradaccum.cli.subject import budget_of, built, lengths_of, subject_of
from gradaccum.cli.targets import Build
from gradaccum.collate import to_device
from gradaccum.errors import ArgumentError
from gradaccum.integrations.transformers import masks_as_in_earnest
from gradaccum.levers import Levers, checkpoint_blocks, parked
from gradaccum.loss import Tally, checked_terms
from gradaccum.planner import Subject, plan
from gradaccum.recipes.settings import Settings
from gradaccum.report.frontier import as_json, caps_table, draw, frontier_tables, parts_table
from gradaccum.units import binary

_TIMED_TOKENS = 1024
_WARM, _TIMED = 2, 5  # runs of a micro-batch


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
    with console.status("preparing data and model ..."):
        recipe = built(build, settings.model_copy(update={"device": "cpu"}))
    there = _is_there(device)
    budget = budget_of(settings, recipe, device if there else None)
    subject = subject_of(recipe, settings, parking=device.type != "cpu")
    with console.status("predicting ..."), masks_as_in_earnest():
        clock = partial(_timed, subject, device) if there else None
        made = plan(subject, budget, clock=clock)
    lengths = _shown_lengths(lengths_of(recipe))
    console.print(
        Text(
            f"{settings.recipe} on {device}, {binary(budget.bytes)}, effective batch "
            f"{settings.effective_batch:,}: {made.chosen.micro_batches:.1f} accumulation steps, "
            f"{100 * made.chosen.real_share:.1f}% of the computed tokens real\n"
        ),
        soft_wrap=True,
    )
    for table in (parts_table(made), caps_table(made, lengths), *frontier_tables(made)):
        console.print(table)
        console.print()
    console.print(Text(made.reason), soft_wrap=True)
    if not there:
        console.print(
            f"There is no {device} here: time is told in floating-point operations. The way to "
            "the host and back, of what is parked, is not in it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", {"recipe": settings.recipe} | as_json(made, lengths))
    try:
        draw(made, folder / "frontier.png")
    except ModuleNotFoundError:
        console.print("No picture, since matplotlib is not installed.")
    console.print(Text(f"plan: {folder}"), soft_wrap=True)


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


def _timed(subject: Subject, device: torch.device, every: Sequence[Levers]) -> list[float]:
    """Return the seconds of a floating-point operation, from a micro-batch run in earnest.

    In rounds over all levers, so that a busy machine is busy for all of them; the fastest counts.
    """
    positions = _timed_positions(subject)
    micro = to_device(subject.feed.peek(subject.batches[0], positions.tolist()), device)
    runs = [_run_of(subject, device, levers, micro) for levers in every]
    seconds = [[_seconds(run, device) for run in runs] for _ in range(_WARM + _TIMED)]
    fastest = np.min(seconds[_WARM:], axis=0)
    return [float(fastest[k]) / _flops(subject, one, positions) for k, one in enumerate(every)]


def _flops(subject: Subject, levers: Levers, positions: np.ndarray) -> int:
    trial = subject.trial(levers)
    with trial.opened():
        trial.probe(positions)
    return max(trial.work[-1].flops, 1)


def _run_of(
    subject: Subject, device: torch.device, levers: Levers, micro: Any
) -> Callable[[], None]:
    """Return a forward and backward pass under some levers."""
    model = deepcopy(subject.model).to(device)
    if levers.checkpointing:
        checkpoint_blocks(model)
    loss = (subject.chunked_loss if levers.chunked_loss else None) or subject.loss
    if levers.parking:
        loss = parked(loss)

    first = subject.batches[0]
    weighed = None if subject.weigh is None else weigh(first, subject.weigh)

    def run() -> None:
        terms = checked_terms(loss(model, micro), call="loss(model, micro_batch)")
        torch.autograd.backward(Tally(weighed).differentiable(terms))

    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    started = perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter() - started


def _timed_positions(subject: Subject) -> np.ndarray:
    """Return samples of middling length, about a thousand tokens of them."""
    first = subject.batches[0]
    lengths = first.lengths(subject.feed.length)
    if lengths is None:
        return np.arange(min(4, len(first)))
    order = np.argsort(lengths, kind="stable")
    middle = len(order) // 2
    count = max(1, min(_TIMED_TOKENS // max(int(lengths[order[middle]]), 1), len(order) // 2))
    return order[middle - count // 2 : middle - count // 2 + count]


def _shown_lengths(lengths: np.ndarray | None) -> list[int]:
    """Return a few lengths between the median and the longest; 1 where samples have none."""
    if lengths is None:
        return [1]
    return sorted({int(np.quantile(lengths, q, method="higher")) for q in (0.25, 0.5, 0.9, 1.0)})
