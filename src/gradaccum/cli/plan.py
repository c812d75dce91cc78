"""``gradaccum plan``: what fits, before anything runs."""

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


def plan(
    recipe: Target,
    data: Data = None,
    text_field: TextField = None,
    tokenizer: Tokenizer = None,
    model: Model = None,
    max_length: MaxLength = None,
    memory: Memory = None,
    effective_batch: EffectiveBatch = None,
    seed: Seed = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, here or elsewhere; else an accelerator if any.")
    ] = None,
    out: Out = None,
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
    build, settings = resolve(
        recipe, {k: v for k, v in told.items() if v is not None}, command="plan"
    )
    run_plan(build, settings, out)
