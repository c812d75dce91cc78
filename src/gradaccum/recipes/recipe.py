"""What a recipe supplies: a model, its loss, its data and its optimizer; never a loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from gradaccum.recipes.objective import Objective
from gradaccum.recipes.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of a training run. ``module:factory`` returns one, given the settings.

    Args:
        model: On the device.
        train: Map-style dataset of samples.
        loss: ``loss(model, micro_batch)``.
        optimizer: Holds parameters of the model.
        objectives: In place of `loss` and `optimizer`: several losses that are trained side by
            side, as those of a generator and its discriminator.
        held_out: Samples that are not trained on; their loss tells how far training is.
        chunked_loss: The same loss with a head in chunks, where that is possible; taken where one
            sample alone would not fit into memory.
        lengths: ``(n,)`` tokens of the training samples; None if they are all alike.
        length: Length of a sample in tokens; by default that of its ``input_ids``.
        weigh: Weight of a sample in each term of the loss, where there are several.
        collate: From samples to a micro-batch, if the default collation is not enough.
        pad: Padding values for the default collation, or a tokenizer.
        score: In place of the loss of `held_out`: a name, and what measures how far training is,
            the lower the better.
        baseline: What a trivial model reaches on the held-out samples, or a perfect one by the
            score, with its name.
        coupled: The modules through which samples of a micro-batch interact, if that is known and
            wanted: told when an effective batch is cut, in place of a check at the first step.
        save: Writes the trained model into a folder, as its ecosystem loads it.
        show: Returns a text that shows what the trained model does.
        pictures: Writes a PNG that shows what the model does by now.

    Raises:
        ArgumentError: What is trained is not told, or told twice.
    """

    model: nn.Module
    train: Any
    loss: LossFunction | None = None
    optimizer: Optimizer | None = None
    objectives: Sequence[Objective] = ()
    held_out: Sequence[Any] = ()
    chunked_loss: LossFunction | None = None
    lengths: np.ndarray | None = None
    length: LengthFunction | None = None
    weigh: WeighFunction | None = None
    collate: CollateFunction | None = None
    pad: Any = None
    score: tuple[str, Callable[[], float]] | None = None
    baseline: tuple[str, float] | None = None
    coupled: str | None = None
    save: Callable[[Path], None] | None = None
    show: Callable[[], str] | None = None
    pictures: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        own = (self.loss, self.optimizer, self.chunked_loss, self.weigh)
        names = [objective.name for objective in self.objectives]
        if not names and (self.loss is None or self.optimizer is None):
            got = "neither" if self.loss is None and self.optimizer is None else "one of the two"
        elif names and any(part is not None for part in own):
            got = "both"
        elif len(set(names)) < len(names):
            got = f"objectives of one name: {', '.join(map(repr, names))}"
        elif len(names) > 1 and self.score is None:
            got = "several objectives without a score=, which tells how far training is"
        else:
            return
        raise ArgumentError(
            "Recipe(...)",
            expected="loss= and optimizer=, or objectives=",
            got=got,
            remedy="Give one loss with its optimizer, or objectives=[Objective(name=..., "
            "loss=..., optimizer=...), ...] and a score=.",
        )

    @property
    def trained(self) -> tuple[Objective, ...]:
        """What is trained: the objectives, or the one loss as one."""
        if self.loss is None or self.optimizer is None:
            return tuple(self.objectives)
        return (
            Objective(
                loss=self.loss,
                optimizer=self.optimizer,
                chunked_loss=self.chunked_loss,
                weigh=self.weigh,
            ),
        )

    def with_objectives(self, objectives: Sequence[Objective]) -> "Recipe":
        """Return this recipe with other objectives in place of its own."""
        return replace(
            self, objectives=objectives, loss=None, optimizer=None, chunked_loss=None, weigh=None
        )


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
