"""The slow, obvious twin: every sample by itself, one division, one backward, torch's own clip.

It shares no code with the library: no micro-batches, no padding, no accumulated sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

SampleLoss = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""From a model and one sample to the sample's summed loss and its weight."""


@dataclass
class Step:
    """What one optimizer step of the full batch did."""

    loss: float
    grad_norm: float
    lr: float
    gradients: list[Tensor]
    parameters: list[Tensor]


def full_batch_step(
    model: nn.Module,
    samples: Sequence[Any],
    sample_loss: SampleLoss,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    max_grad_norm: float | None,
) -> Step:
    """Make the update of the full batch, in whatever precision the model has."""
    parameters = list(model.parameters())
    optimizer.zero_grad()
    losses, weights = zip(*(sample_loss(model, sample) for sample in samples), strict=True)
    mean = torch.stack(losses).sum() / sum(weights)
    mean.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    norm = torch.sqrt(sum((g**2).sum() for g in gradients))
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    seen = [g.clone() for g in gradients]
    lr = optimizer.param_groups[0]["lr"]
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    after = [p.detach().clone() for p in parameters]
    return Step(mean.item(), norm.item(), lr, seen, after)
