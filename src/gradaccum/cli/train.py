"""``gradaccum train``: one loop for every recipe."""

from typing import Annotated

import typer

from gradaccum.cli import options
from gradaccum.recipes.settings import Scheduler
from gradaccum.sizes import LrRule


def train(
    recipe: options.Target,
    data: options.Data = None,
    text_field: options.TextField = None,
    tokenizer: options.Tokenizer = None,
    model: options.Model = None,
    max_length: options.MaxLength = None,
    image_size: options.ImageSize = None,
    spectral_norm: options.SpectralNorm = None,
    effective_batch: options.EffectiveBatch = None,
    memory: options.Memory = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Samples on the device at once, in place of --memory.")
    ] = None,
    micro_batch_tokens: Annotated[
        int | None, typer.Option(help="Most tokens on the device at once, in place of --memory.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    lr_rule: Annotated[
        LrRule | None, typer.Option(help="How the learning rate follows --effective-batch.")
    ] = None,
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
    dtype: options.ParameterDtype = None,
    sum_dtype: options.SumDtype = None,
    master_weights: options.MasterWeights = None,
    stochastic_rounding: options.StochasticRounding = None,
    seed: options.Seed = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 ...; else an accelerator if any.")
    ] = None,
    out: options.Out = None,
) -> None:
    """Train a model at any effective batch size.

    Ctrl-C ends training after the current optimizer step and saves what was learnt; a second
    one ends it at once.
    """
    given = options.given(locals())
    from gradaccum.cli.run import run
    from gradaccum.cli.targets import resolve

    build, settings = resolve(recipe, given)
    run(build, settings, out)
