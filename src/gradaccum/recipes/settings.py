"""What a training run is told: one flat record, from the command line or a TOML file."""

import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gradaccum.dtypes import Masters
from gradaccum.errors import ArgumentError
from gradaccum.memory import Budget
from gradaccum.sizes import LrRule, parsed_sizes

Scheduler = Literal["cosine", "linear", "constant"]
Dtype = Literal["float32", "bfloat16"]
ImageSize = Literal[32, 64, 128, 256]

# What only recipes on text, or only those on images, can use.
TEXT = frozenset({"text_field", "tokenizer", "model", "max_length", "micro_batch_tokens"})
IMAGES = frozenset({"image_size", "spectral_norm"})

_DTYPES: Mapping[Dtype, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16}
)

_CHOICES = (("memory", "micro_batch_size", "micro_batch_tokens"), ("steps", "epochs"))


class Settings(BaseModel):
    """Everything that is needed to repeat a run.

    Attributes:
        recipe: Name of a recipe, or ``module:factory``.
        data: The user's own files; by default text that the running Python brings along, or
            photographs that scikit-image does.
        text_field: Column of tables and JSON lines that holds the text.
        tokenizer: Folder or name of a tokenizer; by default one is trained on the data.
        model: Folder or name of a pretrained model; by default a small new one.
        max_length: Longest sample in tokens; longer ones are cut into pieces.
        image_size: Pixels of a side of an image, for recipes on images; by default 64.
        spectral_norm: Whether the discriminator of a GAN has its weights normalized.
        effective_batch: Samples whose gradients make one optimizer step; ``"64,1000:256"`` is 64
            at first, and 256 after 1000 optimizer steps.
        lr_rule: How the learning rate follows that size: ``"linear"`` or ``"sqrt"`` of its ratio to
            the first one, or ``"none"``.
        memory: Bytes that a step may use on the device, such as ``"4GiB"``; by default nine tenths
            of what is free.
        micro_batch_size: Samples in a micro-batch, in place of `memory`.
        micro_batch_tokens: Most tokens in a micro-batch, after padding, in place of `memory`.
        steps: Optimizer steps, in place of `epochs`.
        epochs: Passes over the data.
        lr: Peak learning rate.
        weight_decay: Of AdamW, for matrices.
        max_grad_norm: Bound on the norm of the gradient.
        scheduler: Course of the learning rate after the warm-up.
        warmup: Optimizer steps in which the learning rate rises to its peak; by default 20, or
            half of a shorter run.
        dtype: Of the parameters.
        sum_dtype: The least of gradient sums; by default float32, also where `dtype` is narrower.
        master_weights: Whether parameters of 16 bits are updated by float32 copies.
        stochastic_rounding: Whether they are updated in float32 and rounded at random, in place of
            copies.
        seed: Of the weights, the data order and all that is random.
        device: Where to train, ``"cpu"`` or ``"cuda"``; by default an accelerator if there is one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    data: str | None = None
    text_field: str | None = None
    tokenizer: str | None = None
    model: str | None = None
    max_length: int = Field(512, ge=3)
    image_size: ImageSize | None = None
    spectral_norm: bool | None = None
    effective_batch: int | str = 64
    lr_rule: LrRule = "none"
    memory: str | None = None
    micro_batch_size: int | None = Field(None, ge=1)
    micro_batch_tokens: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False)
    max_grad_norm: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    scheduler: Scheduler = "cosine"
    warmup: int | None = Field(None, ge=0)
    dtype: Dtype = "float32"
    sum_dtype: Dtype = "float32"
    master_weights: bool = False
    stochastic_rounding: bool = False
    seed: int = Field(0, ge=0)
    device: str | None = None

    @field_validator("memory", mode="before")
    @classmethod
    def _is_a_budget(cls, memory: Any) -> str | None:
        if memory is None:
            return None
        try:
            Budget.of(memory)
        except ArgumentError as error:
            raise ValueError(error.expected) from None
        return str(memory)

    @field_validator("effective_batch", mode="before")
    @classmethod
    def _is_a_size(cls, told: Any) -> int | str:
        try:
            sizes = parsed_sizes(told)
        except ArgumentError as error:
            raise ValueError(error.expected) from None
        return sizes if isinstance(sizes, int) else str(told)

    @property
    def sizes(self) -> int | dict[int, int]:
        """The effective batch size: a number, or sizes by the optimizer steps before each."""
        return parsed_sizes(self.effective_batch)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """What `dtype` names."""
        return _DTYPES[self.dtype]

    @property
    def least_sum_dtype(self) -> torch.dtype:
        """What `sum_dtype` names."""
        return _DTYPES[self.sum_dtype]

    @property
    def masters(self) -> Masters:
        """What 16-bit parameters are updated by."""
        return Masters.of(self.master_weights, self.stochastic_rounding)

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for choice in _CHOICES:
            told = [name for name in choice if getattr(self, name) is not None]
            if len(told) > 1:
                raise ValueError(f"only one of {', '.join(choice)}")
        if self.master_weights and self.stochastic_rounding:
            raise ValueError("only one of master_weights, stochastic_rounding")
        return self


def settings(
    defaults: Mapping[str, Any],
    *sources: Mapping[str, Any],
    call: str = "settings",
    unused: Collection[str] = (),
) -> Settings:
    """Build settings; later sources win.

    Args:
        defaults: A recipe's own defaults.
        sources: A file's entries, then those of the command line.
        call: Where they came from, for messages.
        unused: What the recipe has no use for.

    Returns:
        The settings.

    Raises:
        ArgumentError: A key is unknown or of no use to the recipe, or a value is not possible.
    """
    merged = dict(defaults)
    for source in sources:
        for key, value in source.items():
            if key not in Settings.model_fields:
                raise ArgumentError(
                    f"{call}: {key}",
                    expected=f"one of {', '.join(Settings.model_fields)}",
                    got=repr(key),
                    remedy=nearest(key, list(Settings.model_fields)),
                )
            # A default may stand: the config.toml of a run names all that is not None.
            if key in unused and value != Settings.model_fields[key].default:
                raise ArgumentError(
                    f"{call}: {key}",
                    expected="settings that this recipe uses",
                    got=f"{key} = {value!r}",
                    remedy="Leave it out.",
                )
            for choice in _CHOICES:
                if key in choice:
                    for other in set(choice) - set(source):
                        merged.pop(other, None)  # a choice replaces the other ways to say it
            merged[key] = value
    try:
        return Settings(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ArgumentError(
            f"{call}: {key} = {first['input']!r}" if key else call,
            expected=first["msg"].removeprefix("Input should be ").removeprefix("Value error, "),
            got=repr(first["input"]) if key else "more",
            remedy="Change it and start again; nothing was written.",
        ) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read settings from a file.

    Args:
        path: A TOML file of flat entries, such as the ``config.toml`` of a run.

    Returns:
        Its entries.

    Raises:
        ArgumentError: The file is missing, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ArgumentError(
            f"train {path}",
            expected="a TOML file of settings",
            got=str(error),
            remedy="Compare with the config.toml in a run folder.",
        ) from error


def nearest(name: str, known: list[str]) -> str:
    """Return a remedy for an unknown name: the nearest one there is.

    Args:
        name: The name.
        known: The names there are.

    Returns:
        A sentence.
    """
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "Take one of these."
