"""What a recipe supplies: a model, its loss, its data and its optimizer; never a loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from gradaccum.batch import LengthFunction, WeighFunction
from gradaccum.collate import CollateFunction
from gradaccum.errors import ArgumentError
from gradaccum.protocols import LossFunction
from gradaccum.recipes.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of a training run. ``module:factory`` returns one, given the settings.

    Args:
        model: On the device.
        loss: ``loss(model, micro_batch)``.
        chunked_loss: The same loss with a head in chunks, where that is possible; taken where one
            sample alone would not fit into memory.
        optimizer: Holds parameters of the model.
        train: Map-style dataset of samples.
        held_out: Samples that are not trained on.
        lengths: ``(n,)`` tokens of the training samples; None if they are all alike.
        length: Length of a sample in tokens; by default that of its ``input_ids``.
        weigh: Weight of a sample in each term of the loss, where there are several.
        collate: From samples to a micro-batch, if the default collation is not enough.
        pad: Padding values for the default collation, or a tokenizer.
        baseline: Loss of a trivial model on the held-out samples, with its name.
        save: Writes the trained model into a folder, as its ecosystem loads it.
        show: Returns a text that shows what the trained model does.
    """

    model: nn.Module
    loss: LossFunction
    optimizer: Optimizer
    train: Any
    held_out: Sequence[Any]
    chunked_loss: LossFunction | None = None
    lengths: np.ndarray | None = None
    length: LengthFunction | None = None
    weigh: WeighFunction | None = None
    collate: CollateFunction | None = None
    pad: Any = None
    baseline: tuple[str, float] | None = None
    save: Callable[[Path], None] | None = None
    show: Callable[[], str] | None = None


def chosen_device(settings: Settings) -> torch.device:
    """Return the device that the settings name, or an accelerator if there is one.

    Args:
        settings: Of the run.

    Returns:
        The device.

    Raises:
        ArgumentError: There is no such device here.
    """
    if settings.device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"device {settings.device!r}",
            expected="a device of this machine",
            got=str(error).splitlines()[0],
            remedy="Leave it out to take an accelerator if there is one, else the CPU.",
        ) from error
    return device


def adamw(model: nn.Module, settings: Settings) -> Optimizer:
    """Build a fused AdamW whose weight decay leaves biases and norms alone.

    Args:
        model: The model.
        settings: Of the run.

    Returns:
        The optimizer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=True)
