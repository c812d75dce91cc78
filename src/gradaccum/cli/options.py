"""The options that commands share, with what ``--help`` says of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gradaccum.recipes.settings import Dtype

Target = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="gpt, bert, gan, a TOML file such as the config.toml of a run, or module:factory.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(help="Text file, folder, glob, .jsonl, .csv or .parquet; for gan, of images."),
]
TextField = Annotated[str | None, typer.Option(help="Column or key that holds the text.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or name of a tokenizer; else one is trained.")
]
Model = Annotated[
    str | None, typer.Option(help="Folder or name of a pretrained model; else a new one.")
]
MaxLength = Annotated[
    int | None, typer.Option(help="Longest sample in tokens; longer ones are cut.")
]
ImageSize = Annotated[
    int | None, typer.Option(help="Pixels of a side of an image: 32, 64, 128 or 256.")
]
SpectralNorm = Annotated[
    bool | None, typer.Option("--spectral-norm", help="Normalize the discriminator's weights.")
]
EffectiveBatch = Annotated[
    str | None,
    typer.Option(help="Samples in one optimizer step; 64,1000:256 is 256 after 1000 steps."),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Most that a step may use on the device, as 4GiB; else what is free."),
]
ParameterDtype = Annotated[Dtype | None, typer.Option("--dtype", help="Of the parameters.")]
SumDtype = Annotated[
    Dtype | None,
    typer.Option(help="The least of gradient sums: float32, which loses nothing, or bfloat16."),
]
MasterWeights = Annotated[
    bool | None,
    typer.Option("--master-weights", help="Update 16-bit parameters by float32 copies."),
]
StochasticRounding = Annotated[
    bool | None,
    typer.Option("--stochastic-rounding", help="Or round their updates up or down at random."),
]
Seed = Annotated[int | None, typer.Option(help="Same seed, same run.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder that is made; else runs/ or plans/RECIPE-TIME.")
]


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among what a command was called with.

    Args:
        arguments: Of the command, by name.

    Returns:
        Those that the user gave.
    """
    beside = {"recipe", "out"}
    return {k: v for k, v in arguments.items() if v is not None and k not in beside}
