"""The loss scale of half precision: chosen at the start of an effective batch, settled at its end.

Gradients of float16 vanish below 6e-8 and overflow above 65,504. torch's GradScaler multiplies the
loss by a number that it lowers where a gradient overflowed. Here the loss is a sum and not a mean,
so its gradients are larger by the weight: the first micro-batch is divided by a power of two near
its weight, which changes no digit, and all others by the same.
"""

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradaccum.loss.value import Loss


class LossScale:
    """Drives a GradScaler once for each effective batch.

    Args:
        scaler: The scaler, enabled.
        optimizer: Under whose name the scaler is told what was found.
    """

    def __init__(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._scaler, self._optimizer = scaler, optimizer

    def factor(self, loss: Loss, *, divided: bool) -> Tensor:
        """Return what the losses of an effective batch are multiplied by.

        Args:
            loss: Of its first micro-batch.
            divided: Whether the losses are divided by their weights already.

        Returns:
            0-dimensional tensor.
        """
        one = torch.ones((), device=loss.sum.device)
        if not divided:
            weight = one * loss.weight
            one = torch.exp2(-torch.floor(torch.log2(weight.clamp(min=1.0))))
        return self._scaler.scale(one).detach()

    def can_be_lowered(self) -> bool:
        """Return whether an overflow may be the scale's, and not the gradient's own."""
        return bool(self._scaler.get_scale() >= 1.0)

    def settle(self, *, overflow: bool, device: torch.device) -> None:
        """Tell the scaler whether a gradient overflowed: it lowers its scale, or counts a step.

        Args:
            overflow: Whether one did.
            device: Of the scale.
        """
        # As unscale_ would, which reads all gradients once more to find out.
        told = self._scaler._per_optimizer_states[id(self._optimizer)]
        found = torch.full((), float(overflow), dtype=torch.float32, device=device)
        told["found_inf_per_device"] = {device: found}
        self._scaler.update()
