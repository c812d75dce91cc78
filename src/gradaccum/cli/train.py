"""``gradaccum train``: one loop for every recipe."""

from typing import Annotated, Any

import typer

from gradaccum.cli.options import (
    Data,
    EffectiveBatch,
    MaxLength,
    Memory,
    Model,
    Out,
    Seed,
    Target,
    TextField,
    Tokenizer,
)
from gradaccum.recipes.settings import Scheduler


def train(
    recipe: Target,
    data: Data = None,
    text_field: TextField = None,
    tokenizer: Tokenizer = None,
    model: Model = None,
    max_length: MaxLength = None,
    effective_batch: EffectiveBatch = None,
    memory: Memory = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Samples on the device at once, in place of --memory.")
    ] = None,
    micro_batch_tokens: Annotated[
        int | None, typer.Option(help="Most tokens on the device at once, in place of --memory.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of matrices.")] = None,
    max_grad_norm: Annotated[
        float | None, typer.Option(help="Bound on the norm of the gradient.")
    ] = None,
    scheduler: Annotated[
        Scheduler | None, typer.Option(help="Course of the learning rate after warm-up.")
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps of rising learning rate; else 20, or half of a short run."
        ),
    ] = None,
    seed: Seed = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 ...; else an accelerator if any.")
    ] = None,
    out: Out = None,
) -> None:
    """Train a model at any effective batch size.

    Ctrl-C ends training after the current optimizer step and saves what was learnt; a second
    one ends it at once.
    """
    from gradaccum.cli.run import run
    from gradaccum.cli.targets import resolve

    told: dict[str, Any] = {
        "data": data,
        "text_field": text_field,
        "tokenizer": tokenizer,
        "model": model,
        "max_length": max_length,
        "effective_batch": effective_batch,
        "memory": memory,
        "micro_batch_size": micro_batch_size,
        "micro_batch_tokens": micro_batch_tokens,
        "steps": steps,
        "epochs": epochs,
        "lr": lr,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "scheduler": scheduler,
        "warmup": warmup,
        "seed": seed,
        "device": device,
    }
    build, settings = resolve(recipe, {k: v for k, v in told.items() if v is not None})
    run(build, settings, out)
