"""The one file that scales a gradient: divide by the weight, clip and step, in one pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

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

    Sums come as lists of tensors, one list for each parameter group of the optimizers.

    Args:
        optimizers: Stepped one after the other.
        max_grad_norm: Bound on the 2-norm of the normalised gradient over all optimizers;
            None for no bound. A parameter group with an entry ``"max_grad_norm"`` is clipped by
            itself, and not along with the others.
    """

    optimizers: tuple[Optimizer, ...]
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        _check_bound(self.max_grad_norm, "max_grad_norm")
        for optimizer in self.optimizers:
            for k, group in enumerate(optimizer.param_groups):
                where = f"{type(optimizer).__name__}.param_groups[{k}]['max_grad_norm']"
                _check_bound(group.get("max_grad_norm"), where)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def norms(self, sums: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the 2-norms of what is clipped together: the one norm pass.

        Args:
            sums: The gradient sums.

        Returns:
            ``(k,)``, on the device of the first sum; the norm of the whole is theirs.
        """
        found = [
            get_total_norm([total for k in together for total in sums[k]])
            for together, _ in self._clips()
        ]
        if len(found) == 1:
            return found[0].reshape(1)
        device = next((total.device for total in chain(*sums)), None)
        return torch.stack([norm.to(device, found[0].dtype) for norm in found])

    def scales(self, *, divisor: float, norms: Sequence[float]) -> list[float]:
        """Return the number that the sums of each parameter group are multiplied by.

        Args:
            divisor: What the sums are divided by, before they are clipped.
            norms: What `norms` returned.

        Returns:
            ``min(1, max_grad_norm / (grad_norm + 1e-6)) / divisor`` for each group, where
            ``grad_norm`` is the norm of what it is clipped with, divided.
        """
        found: dict[int, float] = {}
        for (together, bound), norm in zip(self._clips(), norms, strict=True):
            clip = 1.0 if bound is None else min(1.0, bound / (norm / divisor + _CLIP_EPSILON))
            found |= dict.fromkeys(together, clip / divisor)
        return [found[k] for k in range(len(found))]

    def __call__(
        self,
        sums: Sequence[list[Tensor]],
        *,
        scales: Sequence[float],
        lr_scale: float = 1.0,
        narrow: Callable[[], None] | None = None,
    ) -> None:
        """Scale the sums and step the optimizers.

        A fused optimizer takes the scale along in its own pass over the gradients, so they are
        not read and written once more.

        Args:
            sums: The gradient sums, in place in ``.grad``.
            scales: What those of each parameter group are multiplied by.
            lr_scale: What learning rates are multiplied by, for this one step.
            narrow: Brings scaled sums to the dtypes that the optimizers take, if those are others;
                `sums` is emptied before.
        """
        begin = 0
        fused: list[float] = []
        for optimizer in self.optimizers:
            own = slice(begin, begin := begin + len(optimizer.param_groups))
            by_kernel = narrow is None and _scales_itself(optimizer) and len({*scales[own]}) == 1
            fused.append(scales[own][0] if by_kernel else 1.0)
            for totals, scale in () if by_kernel else zip(sums[own], scales[own], strict=True):
                if totals and scale != 1.0:
                    torch._foreach_mul_(totals, scale)
        device = next((total.device for total in chain(*sums)), None)
        if narrow is not None:
            for totals in sums:
                totals.clear()
            narrow()
        for optimizer, scale in zip(self.optimizers, fused, strict=True):
            with _for_one_step(optimizer, lr_scale=lr_scale, grad_scale=scale, device=device):
                optimizer.step()

    def _clips(self) -> list[tuple[list[int], float | None]]:
        """Return which parameter groups are clipped together, with their bounds."""
        groups = [group for o in self.optimizers for group in o.param_groups]
        alone = [k for k, group in enumerate(groups) if group.get("max_grad_norm") is not None]
        rest = [k for k in range(len(groups)) if k not in alone]
        own: list[tuple[list[int], float | None]] = [
            ([k], groups[k]["max_grad_norm"]) for k in alone
        ]
        return own + [(rest, self.max_grad_norm)] * bool(rest)


def _check_bound(bound: Any, where: str) -> None:
    if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
        raise ArgumentError(
            f"{where}={bound!r}",
            expected="a positive norm, or None for no clipping",
            got=repr(bound),
            remedy=f"Pass {where}=None to leave gradients unclipped.",
        )


def _scales_itself(optimizer: Optimizer) -> bool:
    """Return whether the kernel divides by ``grad_scale``, which it takes in float32."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") and all(p.dtype != torch.float64 for p in group["params"])
        for group in optimizer.param_groups
    )


@contextmanager
def _for_one_step(
    optimizer: Optimizer, *, lr_scale: float, grad_scale: float, device: torch.device | None
) -> Iterator[None]:
    """Multiply learning rates, and let a fused kernel multiply gradients, while it steps.

    A scheduler finds learning rates as it has set them.
    """
    attributes: dict[str, Any] = vars(optimizer)  # where torch's GradScaler puts them as well
    rates = [group["lr"] for group in optimizer.param_groups]
    if grad_scale != 1.0 and device is not None:  # else no loss has reached a parameter
        attributes["grad_scale"] = torch.full(
            (), 1 / grad_scale, dtype=torch.float32, device=device
        )
    try:
        if lr_scale != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * lr_scale
        yield
    finally:
        attributes.pop("grad_scale", None)
        if lr_scale != 1.0:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


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
