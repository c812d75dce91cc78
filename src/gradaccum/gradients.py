"""Where gradient sums live: in ``.grad``, added in place by autograd."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from gradaccum.errors import PhaseError


class Gradients:
    """The gradient sums of the parameters that some optimizers hold. Nothing is scaled here.

    Only these parameters receive gradients: a generator's pass through its discriminator leaves
    the discriminator's sums alone. Autograd can be told so (``inputs=``), which costs 4 % of a
    small backward pass. So the graph of a micro-batch is searched for parameters of others, and
    autograd is told only if there are any; a graph of as many nodes as the one before is not
    searched again.

    Args:
        optimizers: Their parameter groups are read anew for each effective batch, so parameters
            that were added or unfrozen in between take part.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._parameters: list[Parameter] = []
        self._own: frozenset[int] = frozenset()  # their ids
        self._alone = True  # no other's parameter is in reach of the graph that was searched last
        self._last_node = self._nodes = 0  # number of its last node, and how many it has
        self._watched: list[tuple[Parameter, Tensor, int]] = []

    def clear(self) -> None:
        """Free the sums of every parameter, and note which parameters want one."""
        self._parameters = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
                    if parameter.requires_grad:
                        self._parameters.append(parameter)
        self._watched = []
        own = frozenset(map(id, self._parameters))
        if own != self._own:
            self._own, self._nodes = own, 0

    def add(self, total: Tensor) -> None:
        """Add the gradient of a summed loss. Its graph is freed.

        Args:
            total: 0-dimensional tensor.

        Raises:
            PhaseError: The sums were changed by someone else since the last micro-batch.
        """
        if any(p.grad is not sums or sums._version != k for p, sums, k in self._watched):
            raise PhaseError(
                "gradient sums in the middle of an effective batch",
                expected="no change from outside",
                got="another backward, zero_grad or scaling of these parameters' .grad",
                remedy="Give each loss to the accumulator; it divides, clips and clears.",
            )
        inputs = None if self._is_alone(total) else self._parameters
        torch.autograd.backward(total, inputs=inputs)
        self._watch()

    def tensors(self) -> list[Tensor]:
        """Return the sums that exist; a parameter that no loss has reached has none."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def norm(self) -> Tensor:
        """Return the 2-norm over all sums, a 0-dimensional tensor: the one norm pass."""
        return get_total_norm(self.tensors())

    def _is_alone(self, total: Tensor) -> bool:
        """Return whether a graph reaches none but these parameters.

        Autograd numbers its nodes as they are made, so the distance between the last nodes of two
        micro-batches is the number of nodes of the second. While it stays the same the model
        took the same way, and the answer stands.
        """
        if total.grad_fn is None:  # the loss is a parameter itself
            return False
        number: int = total.grad_fn._sequence_nr()
        nodes, self._last_node = number - self._last_node, number
        if nodes != self._nodes:
            self._nodes, self._alone = nodes, not _reaches_others(total, self._own)
        return self._alone

    def _watch(self) -> None:
        """Note the first and the last sum, and how often each was changed in place.

        Two stand for all: another backward, `zero_grad` or a rescaling changes both.
        """
        if self._watched:
            ends = [p for p, _, _ in self._watched]
        else:
            reached = [p for p in self._parameters if p.grad is not None]
            ends = [reached[0], reached[-1]] if reached else []
        self._watched = [(p, p.grad, p.grad._version) for p in ends if p.grad is not None]


def _reaches_others(total: Tensor, own: Collection[int]) -> bool:
    """Return whether the graph of a loss has leaves that are not among these, by their ids."""
    waiting = [total.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in () if node is None else node.next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            leaf = getattr(following, "variable", None)  # of autograd's AccumulateGrad
            if leaf is None:
                waiting.append(following)
            elif id(leaf) not in own:
                return True
    return False
