"""``gradaccum train``: one loop for every recipe."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradaccum.recipes.settings import Scheduler


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="gpt, bert, a TOML file such as the config.toml of a run, or module:factory.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(help="Text file, folder, glob, .jsonl, .csv or .parquet."),
    ] = None,
    text_field: Annotated[
        str | None, typer.Option(help="Column or key that holds the text.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or name of a tokenizer; else one is trained.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or name of a pretrained model; else a new one.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Longest sample in tokens; longer ones are cut.")
    ] = None,
    effective_batch: Annotated[
        int | None, typer.Option(help="Samples in one optimizer step.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Most that a step may use on the device, as 4GiB; else what is free."),
    ] = None,
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
    seed: Annotated[int | None, typer.Option(help="Same seed, same run.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 ...; else an accelerator if any.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default runs/RECIPE-TIME.")
    ] = None,
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
