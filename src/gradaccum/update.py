"""The one file that scales a gradient: divide by the weight, clip and step, in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gradaccum.errors import ArgumentError

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that both clip alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The update of the parameters from gradient sums.

    Args:
        optimizers: Stepped one after the other.
        max_grad_norm: Bound on the 2-norm of the normalised gradient over all optimizers;
            None for no bound.
    """

    optimizers: tuple[Optimizer, ...]
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        bound = self.max_grad_norm
        if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
            raise ArgumentError(
                f"max_grad_norm={bound!r}",
                expected="a positive norm, or None for no clipping",
                got=repr(bound),
                remedy="Pass max_grad_norm=None to leave gradients unclipped.",
            )

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def scale(self, *, weight: float, grad_norm: float) -> float:
        """Return the number that gradient sums are multiplied by.

        Args:
            weight: What the sums are divided by.
            grad_norm: 2-norm of the normalised gradient.

        Returns:
            ``min(1, max_grad_norm / (grad_norm + 1e-6)) / weight``.
        """
        if self.max_grad_norm is None:
            return 1.0 / weight
        return min(1.0, self.max_grad_norm / (grad_norm + _CLIP_EPSILON)) / weight

    def __call__(self, sums: Sequence[Tensor], *, scale: float) -> None:
        """Scale the sums and step the optimizers.

        A fused optimizer takes the scale along in its own pass over the gradients, so they are
        not read and written once more.

        Args:
            sums: The gradient sums, in place in ``.grad``.
            scale: What they are multiplied by.
        """
        if not sums:
            scale = 1.0  # no loss has reached these parameters
        elif scale != 1.0 and not all(map(_scales_itself, self.optimizers)):
            torch._foreach_mul_(list(sums), scale)
            scale = 1.0
        for optimizer in self.optimizers:
            if scale == 1.0:
                optimizer.step()
            else:
                _step_scaled(optimizer, scale, sums[0].device)


def gradient_norm(sums: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm over all gradient sums, a 0-dimensional tensor: the one norm pass."""
    return get_total_norm(sums)


def _scales_itself(optimizer: Optimizer) -> bool:
    """Return whether the kernel divides by ``grad_scale``, which it takes in float32."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") and all(p.dtype != torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


def _step_scaled(optimizer: Optimizer, scale: float, device: torch.device) -> None:
    fused: dict[str, Tensor] = vars(optimizer)  # where torch's GradScaler puts them as well
    fused["grad_scale"] = torch.full((), 1.0 / scale, dtype=torch.float32, device=device)
    try:
        optimizer.step()
    finally:
        del fused["grad_scale"]


def advance(scheduler: LRScheduler, loss: float) -> None:
    """Move a scheduler by one optimizer step.

    Args:
        scheduler: Any of torch's; `ReduceLROnPlateau` is given the loss.
        loss: Mean loss of the effective batch.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()
