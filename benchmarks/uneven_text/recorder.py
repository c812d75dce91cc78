"""What is measured of a training loop, from outside of it: hooks on its model and optimizer."""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.uneven_text.setting import PAD


class Recorder:
    """Notes when optimizer steps end, what the model was given, and the first gradient.

    The time of a step is that between the ends of two optimizer steps, so that everything that
    a loop does is in it: reading, collating, clearing gradients, moving a scheduler. The first
    step warms up; its gradient is copied just before the optimizer uses it.

    Args:
        model: The model.
        optimizer: Its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._ends: list[float] = []
        self._real = self._computed = 0
        self.gradients: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def result(self) -> dict[str, Any]:
        """Return the numbers of all steps but the first."""
        seconds = [
            after - before for before, after in zip(self._ends, self._ends[1:], strict=False)
        ]
        return {
            "seconds_per_step": sum(seconds) / len(seconds) if seconds else None,
            "seconds_of_steps": seconds,
            "steps": len(seconds),
            "real_tokens": self._real,
            "computed_tokens": self._computed,
            "real_share": self._real / self._computed if seconds else None,
            "real_tokens_per_second": self._real / sum(seconds) if seconds else None,
        }

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.gradients:
            return
        # A fused optimizer divides by grad_scale itself, where it is set.
        scale = getattr(optimizer, "grad_scale", None)
        for name, parameter in self._model.named_parameters():
            gradient = parameter.grad.detach().double()
            self.gradients[name] = gradient.clone() if scale is None else gradient / scale.double()

    def _after_step(self, *_: Any) -> None:
        self._ends.append(perf_counter())

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._ends:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._real += int((ids != PAD).sum())
            self._computed += ids.numel()


def difference(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Return how far gradients are from the reference, as shares of it."""
    found = torch.cat([gradients[name].flatten() for name in reference])
    wanted = torch.cat([gradient.flatten() for gradient in reference.values()])
    return {
        "largest": float((found - wanted).abs().max() / wanted.abs().max()),
        "norm": float((found - wanted).norm() / wanted.norm()),
    }
