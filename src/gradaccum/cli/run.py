"""The one training loop: a recipe in, a run folder out."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import gradaccum as ga
from gradaccum.cli.fitted import sized, with_levers
from gradaccum.cli.folder import (
    choose_folder,
    write_config,
    write_file,
    write_folder,
    write_json,
    write_text,
)
from gradaccum.cli.look import Look, look_of
from gradaccum.cli.side_by_side import accumulators_of, counters_of
from gradaccum.cli.stop import stop_on_interrupt
from gradaccum.cli.subject import built, told_budget
from gradaccum.cli.targets import Build
from gradaccum.partition import Cut
from gradaccum.recipes.recipe import Recipe, chosen_device
from gradaccum.recipes.settings import Settings
from gradaccum.telemetry import JsonLines
from gradaccum.units import count

_LOOKS = 6  # at how far training is, between the first and the last


def run(build: Build, settings: Settings, out: Path | None) -> None:
    """Train, and leave a run folder.

    Args:
        build: Builds the recipe.
        settings: Of the run.
        out: The run folder, if the user named one.
    """
    console = Console()
    folder = choose_folder(out, settings.recipe)
    told_budget(settings, chosen_device(settings))  # refused before anything is built
    with console.status("preparing data and model ..."):
        recipe = built(build, settings)
        settings = sized(settings, recipe)
        recipe, levers = with_levers(recipe, settings)
    batches = ga.effective_batches(
        recipe.train,
        settings.sizes,
        lr_rule=settings.lr_rule,
        lengths=recipe.lengths,
        seed=settings.seed,
        epochs=settings.epochs,
        steps=settings.steps,
    )
    accumulators = accumulators_of(recipe, settings, steps=len(batches))
    look = look_of(recipe, settings, accumulators)
    first = look.measure()
    cuts = [one.cut for one in accumulators.values() if one.cut is not None]
    if recipe.lengths is not None:
        for cut in cuts:
            cut.admit(recipe.lengths)  # before anything is written
    told = {"micro-batch": _told_cut(settings, cuts), "levers": str(levers)}
    console.print(_summary(recipe, settings, told, steps=len(batches), folder=folder))
    console.print(look.line(0, first))
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder / "config.toml", settings, _versions())
    under_way = _Run(
        recipe=recipe, accumulators=accumulators, look=look, folder=folder, console=console
    )
    try:
        with JsonLines(folder / "metrics.jsonl") as metrics:
            stopped = under_way.train(batches, metrics)
    except Exception:  # loses nothing of what was learnt before it; a second Ctrl-C is none
        under_way.finish(first, stopped=True)
        raise
    under_way.finish(first, stopped=stopped)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A run that is under way."""

    recipe: Recipe
    accumulators: Mapping[str, ga.Accumulator]
    look: Look
    folder: Path
    console: Console

    def train(self, batches: ga.EffectiveBatches, metrics: JsonLines) -> bool:
        """Make one step after the other, until the end or Ctrl-C; return whether it was that."""
        total = len(batches)
        every = ceil(total / (_LOOKS + 1))
        self._picture()
        shown = ga.track(batches, self.accumulators, console=self.console)
        with stop_on_interrupt() as stop:
            for done, batch in enumerate(shown, start=1):
                self._step(batch, metrics)
                if stop.asked:
                    told = f"stopped after {done} of {total} effective batches; saving"
                    self.console.print(told)
                    return True
                if done % every == 0 and total - done >= every:
                    self.console.print(self.look.line(self._steps, self.look.measure()))
                    self._picture()
        return False

    def finish(self, first: float, *, stopped: bool) -> None:
        """Save what was learnt, and show it."""
        recipe, folder, console = self.recipe, self.folder, self.console
        if recipe.save is not None:
            write_folder(folder / "model", recipe.save)
        last = self.look.measure()
        console.print(self.look.line(self._steps, last))
        result = {"stopped": stopped} | self.look.result(first, last)
        write_json(folder / "result.json", result | {"counters": counters_of(self.accumulators)})
        if recipe.pictures is not None:
            self._picture()
            write_file(folder / "sample.png", recipe.pictures)
        if recipe.show is not None:
            text = recipe.show()
            write_text(folder / "sample.txt", text + "\n")
            console.print(Panel(Text(text), title="what it learnt", title_align="left"))
        console.print(Text(f"run folder: {folder}"), soft_wrap=True)

    @property
    def _steps(self) -> int:
        """Optimizer steps so far; an error may have come between two objectives."""
        return max(one.counters.optimizer_steps for one in self.accumulators.values())

    def _step(self, batch: Any, metrics: JsonLines) -> None:
        coupled, first = self.recipe.coupled, self._steps == 0
        for name, accumulator in self.accumulators.items():
            report = accumulator.step(batch)
            metrics.write(report, **({"objective": name} if name else {}))
            if first and coupled is not None and report.micro_batches > 1:
                told = f"{name}: {coupled} sees each of {report.micro_batches} micro-batches by "
                told += "itself: not quite the update of the full batch."
                self.console.print(told, soft_wrap=True)

    def _picture(self) -> None:
        if self.recipe.pictures is not None:
            path = self.folder / "samples" / f"step-{self._steps:06}.png"
            write_file(path, self.recipe.pictures)


def _told_cut(settings: Settings, cuts: Sequence[Cut]) -> str:
    """Return how effective batches are cut; or by what they will be, before the first is."""
    if cuts:
        return ", ".join(map(str, cuts))
    if settings.micro_batch_size is not None:
        return f"{settings.micro_batch_size:,} samples"
    if settings.micro_batch_tokens is not None:
        return f"at most {settings.micro_batch_tokens:,} tokens"
    return f"what fits into {settings.memory}"


def _summary(
    recipe: Recipe, settings: Settings, memory: dict[str, str], *, steps: int, folder: Path
) -> Table:
    """Return what is about to be trained, as a table."""
    parameters = sum(p.numel() for p in recipe.model.parameters())
    device = next(recipe.model.parameters()).device
    samples = f"{len(recipe.train):,}"
    if len(recipe.held_out):
        samples += f", and {len(recipe.held_out):,} held out"
    if recipe.lengths is not None:
        samples += f"; {count(float(recipe.lengths.sum()))} tokens"
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("recipe", settings.recipe),
        ("model", f"{type(recipe.model).__name__}, {count(parameters)} parameters, on {device}"),
        ("samples", samples),
        ("effective batch", _told_size(settings)),
        *((name, value) for name, value in memory.items() if value != "none"),
        ("optimizer steps", f"{steps:,}"),
        ("run folder", str(folder)),
    ):
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _told_size(settings: Settings) -> str:
    if isinstance(sizes := settings.sizes, int):
        return f"{sizes:,} samples"
    later = [f"{size:,} after {step:,} optimizer steps" for step, size in sizes.items() if step]
    return ", ".join([f"{sizes[0]:,} samples", *later])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("gradaccum", "torch", "transformers", "tokenizers", "scikit-image", "pillow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
