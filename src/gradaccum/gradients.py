"""Where gradient sums live: in ``.grad``, added in place by autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class Gradients:
    """The gradient sums of the parameters that some optimizers hold.

    Only these parameters receive gradients: a generator's pass through its discriminator leaves
    the discriminator's sums alone. Nothing is scaled here.

    Args:
        optimizers: Their parameter groups are read anew for each effective batch, so parameters
            that were added or unfrozen in between take part.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._parameters: list[Parameter] = []

    def clear(self) -> None:
        """Free the sums of every parameter, and note which parameters want one."""
        self._parameters = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
                    if parameter.requires_grad:
                        self._parameters.append(parameter)

    def add(self, total: Tensor) -> None:
        """Add the gradient of a summed loss. Its graph is freed.

        Args:
            total: 0-dimensional tensor.
        """
        torch.autograd.backward(total, inputs=self._parameters)

    def tensors(self) -> list[Tensor]:
        """Return the sums that exist; a parameter that no loss has reached has none."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def norm(self) -> Tensor:
        """Return the 2-norm over all sums, a 0-dimensional tensor: the one norm pass."""
        return get_total_norm(self.tensors())
