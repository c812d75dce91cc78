"""A model whose gradient is known, an optimizer that notes gradients, and both doors."""

import pytest
import torch
from torch import Tensor, nn

import gradaccum as ga

both_doors = pytest.mark.parametrize("door", ["step", "over"])


class Slope(nn.Module):
    """``w . c``: the gradient of a token is its row of coefficients."""

    def __init__(self, size: int = 1, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), start, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.w


class Recorder(torch.optim.SGD):
    """Plain SGD with lr 1 that notes the gradients that it is stepped with."""

    def __init__(self, parameters, lr: float = 1.0) -> None:
        super().__init__(parameters, lr=lr)
        self.gradients: list[list[Tensor]] = []
        self.register_step_pre_hook(self._note)

    def _note(self, *_) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        self.gradients.append([p.grad.clone() for p in held if p.grad is not None])


def tokens(*coefficients) -> Tensor:
    """Return a micro-batch of tokens, each with its gradient: numbers, or rows of numbers."""
    rows = torch.tensor(coefficients, dtype=torch.float64)
    return rows if rows.ndim == 2 else rows.reshape(-1, 1)


def summed(model: nn.Module, rows: Tensor) -> ga.Loss:
    """Return the summed loss of `Slope`, weighed by its tokens."""
    return ga.Loss(model(rows).sum(), len(rows))


def train(door, model, optimizer, loss, effective_batches, **options) -> list[ga.StepReport]:
    """Run effective batches, each a list of micro-batches, through one of the two doors."""
    if door == "step":  # a sample is a micro-batch, so that this door cuts as told
        accumulator = ga.accumulator(
            model, optimizer, loss, micro_batch_size=1, collate=_lone, verify="never", **options
        )
        return [accumulator.step([(micro,) for micro in batch]) for batch in effective_batches]
    accumulator = ga.accumulator(model, optimizer, **options)
    reports = []
    for batch in effective_batches:
        for micro in accumulator.over(iter(batch), steps=len(batch)):
            report = accumulator.backward(loss(model, micro))
        reports.append(report)
    return reports


def _lone(samples):
    ((micro,),) = samples
    return micro


def update(door, micro_batches, *, loss=summed, model=None, **options):
    """Return the gradient that one effective batch stepped with, and its report."""
    model = model or Slope(micro_batches[0].shape[-1])
    optimizer = Recorder(model.parameters())
    (report,) = train(door, model, optimizer, loss, [micro_batches], **options)
    return flat(optimizer.gradients[0]), report


def flat_gradient(mean: Tensor, model: nn.Module) -> Tensor:
    """Return the gradient of a mean loss in one vector: one backward, nothing accumulated."""
    found = torch.autograd.grad(mean, list(model.parameters()), allow_unused=True)
    return flat(g for g in found if g is not None)


def flat(gradients) -> Tensor:
    """Return gradients in one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def exactly(value):
    """Return what is equal to `value` up to rounding in float64."""
    if isinstance(value, Tensor):
        value = value.detach().tolist()
    return pytest.approx(value, rel=1e-10, abs=1e-13)
