"""``gradaccum plan``: what fits, before anything runs."""

from typing import Annotated

import typer

from gradaccum.cli import options


def plan(
    recipe: options.Target,
    data: options.Data = None,
    text_field: options.TextField = None,
    tokenizer: options.Tokenizer = None,
    model: options.Model = None,
    max_length: options.MaxLength = None,
    image_size: options.ImageSize = None,
    spectral_norm: options.SpectralNorm = None,
    memory: options.Memory = None,
    effective_batch: options.EffectiveBatch = None,
    dtype: options.ParameterDtype = None,
    sum_dtype: options.SumDtype = None,
    master_weights: options.MasterWeights = None,
    stochastic_rounding: options.StochasticRounding = None,
    seed: options.Seed = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, here or elsewhere; else an accelerator if any.")
    ] = None,
    out: options.Out = None,
) -> None:
    """Predict what fits into memory, and what each optimizer step will cost.

    Nothing is trained. Where the device is not here, shapes alone are run, on the CPU.
    """
    given = options.given(locals())
    from gradaccum.cli.planned import run_plan
    from gradaccum.cli.targets import resolve

    build, settings = resolve(recipe, given, command="plan")
    run_plan(build, settings, out)
