"""The one training loop: a recipe in, a run folder out."""

import platform
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import gradaccum as ga
from gradaccum.cli.fitted import sized, with_levers
from gradaccum.cli.folder import choose_folder, write_config, write_folder, write_json, write_text
from gradaccum.cli.stop import stop_on_interrupt
from gradaccum.cli.subject import built, told_budget
from gradaccum.cli.targets import Build
from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.recipe import Recipe, chosen_device
from gradaccum.recipes.schedule import scheduler
from gradaccum.recipes.settings import Settings
from gradaccum.telemetry import JsonLines
from gradaccum.units import count

_LOOKS = 6  # at the held-out samples, between the first and the last


def run(build: Build, settings: Settings, out: Path | None) -> None:
    """Train, and leave a run folder.

    Args:
        build: Builds the recipe.
        settings: Of the run.
        out: The run folder, if the user named one.

    Raises:
        ArgumentError: No sample is held out.
        DataError: Nothing in the held-out samples carries weight.
    """
    console = Console()
    folder = choose_folder(out, settings.recipe)
    told_budget(settings, chosen_device(settings))  # refused before anything is built
    with console.status("preparing data and model ..."):
        recipe = built(build, settings)
        settings = sized(settings, recipe)
        recipe, levers = with_levers(recipe, settings)
    if len(recipe.held_out) == 0:
        raise ArgumentError(
            f"{settings.recipe}: Recipe(held_out=...)",
            expected="at least one sample to evaluate",
            got="none",
            remedy="Hold some samples out of training.",
        )
    batches = ga.effective_batches(
        recipe.train,
        settings.sizes,
        lr_rule=settings.lr_rule,
        lengths=recipe.lengths,
        seed=settings.seed,
        epochs=settings.epochs,
        steps=settings.steps,
    )
    accumulator = ga.accumulator(
        recipe.model,
        recipe.optimizer,
        recipe.loss,
        scheduler=scheduler(recipe.optimizer, settings, steps=len(batches)),
        max_grad_norm=settings.max_grad_norm,
        memory=settings.memory,
        micro_batch_size=settings.micro_batch_size,
        micro_batch_tokens=settings.micro_batch_tokens,
        collate=recipe.collate,
        pad=recipe.pad,
        length=recipe.length,
        weigh=recipe.weigh,
        sum_dtype=settings.least_sum_dtype,
    )
    before = accumulator.evaluate(list(recipe.held_out))
    if before.weight == 0:
        raise DataError(
            f"train {settings.recipe}",
            expected="held-out samples with something to predict",
            got=f"{before.samples} of them, in which no token carries weight",
            remedy="Give more data, so that more of it is held out; or another --seed.",
        )
    if recipe.lengths is not None and accumulator.cut is not None:
        accumulator.cut.admit(recipe.lengths)  # before anything is written
    first = before.loss
    told = {"micro-batch": str(accumulator.cut), "levers": str(levers)}
    console.print(_summary(recipe, settings, told, steps=len(batches), folder=folder))
    console.print(_looked(0, first, recipe))
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder / "config.toml", settings, _versions())
    finish = partial(_finish, folder, recipe, console, first=first, accumulator=accumulator)
    try:
        with JsonLines(folder / "metrics.jsonl") as metrics:
            stopped = _loop(accumulator, batches, recipe, metrics, console)
    except Exception:  # loses nothing of what was learnt before it; a second Ctrl-C is none
        finish(stopped=True)
        raise
    finish(stopped=stopped)


def _loop(
    accumulator: ga.Accumulator,
    batches: ga.EffectiveBatches,
    recipe: Recipe,
    metrics: JsonLines,
    console: Console,
) -> bool:
    """Make one optimizer step after the other, until the end or Ctrl-C; return which it was."""
    total = len(batches)
    every = ceil(total / (_LOOKS + 1))
    with stop_on_interrupt() as stop:
        for done, batch in enumerate(ga.track(batches, accumulator, console=console), start=1):
            metrics.write(accumulator.step(batch))
            if stop.asked:
                console.print(f"stopped after {done} of {total} effective batches; saving")
                return True
            if done % every == 0 and total - done >= every:
                loss = accumulator.evaluate(list(recipe.held_out)).loss
                console.print(_looked(accumulator.counters.optimizer_steps, loss, recipe))
    return False


def _finish(
    folder: Path,
    recipe: Recipe,
    console: Console,
    *,
    first: float,
    accumulator: ga.Accumulator,
    stopped: bool,
) -> None:
    """Save what was learnt, and show it."""
    if recipe.save is not None:
        write_folder(folder / "model", recipe.save)
    last = accumulator.evaluate(list(recipe.held_out)).loss
    counters = accumulator.counters
    console.print(_looked(counters.optimizer_steps, last, recipe))
    result: dict[str, Any] = {
        "stopped": stopped,
        "held_out_loss": {"first": _finite(first), "last": _finite(last)},
    }
    if recipe.baseline is not None:
        result["baseline"] = dict([recipe.baseline])
    write_json(folder / "result.json", result | {"counters": counters.as_dict()})
    if recipe.show is not None:
        text = recipe.show()
        write_text(folder / "sample.txt", text + "\n")
        console.print(Panel(Text(text), title="what it learnt", title_align="left"))
    console.print(Text(f"run folder: {folder}"), soft_wrap=True)


def _summary(
    recipe: Recipe, settings: Settings, memory: dict[str, str], *, steps: int, folder: Path
) -> Table:
    """Return what is about to be trained, as a table."""
    parameters = sum(p.numel() for p in recipe.model.parameters())
    device = next(recipe.model.parameters()).device
    samples = f"{len(recipe.train):,}, and {len(recipe.held_out):,} held out"
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


def _finite(loss: float) -> float | None:
    return loss if isfinite(loss) else None  # JSON has no NaN


def _looked(step: int, loss: float, recipe: Recipe) -> str:
    text = f"optimizer step {step:>5}  held-out loss {loss:.4f}"
    if recipe.baseline is None:
        return text
    name, value = recipe.baseline
    return f"{text}  ({name} {value:.4f})"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("gradaccum", "torch", "transformers", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
