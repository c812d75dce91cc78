"""``gradaccum plan``: what fits, before anything runs."""

from pathlib import Path
from typing import Annotated, Any

import typer


def plan(
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
    memory: Annotated[
        str | None,
        typer.Option(help="Most that a step may use on the device, as 4GiB; else what is free."),
    ] = None,
    effective_batch: Annotated[
        int | None, typer.Option(help="Samples in one optimizer step.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the data order.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, here or elsewhere; else an accelerator if any.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the plan; by default plans/RECIPE-TIME.")
    ] = None,
) -> None:
    """Predict what fits into memory, and what each optimizer step will cost.

    Nothing is trained. Where the device is not here, shapes alone are run, on the CPU.
    """
    from gradaccum.cli.planned import run_plan
    from gradaccum.cli.targets import resolve

    told: dict[str, Any] = {
        "data": data,
        "text_field": text_field,
        "tokenizer": tokenizer,
        "model": model,
        "max_length": max_length,
        "memory": memory,
        "effective_batch": effective_batch,
        "seed": seed,
        "device": device,
    }
    build, settings = resolve(recipe, {k: v for k, v in told.items() if v is not None})
    run_plan(build, settings, out)
