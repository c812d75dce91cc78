"""What the engine needs from its parts, and the null object for "nothing".

The accumulator meets devices, ranks and checks through these alone. A part that does nothing is
an object that does nothing, so the engine has no branch for it.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from gradaccum.batch import EffectiveBatch
    from gradaccum.loss import Loss

Micro = TypeVar("Micro")
Summed = TypeVar("Summed")

LossFunction = Callable[[Any, Any], "Loss | Mapping[str, Loss]"]
"""``loss(model, micro_batch)``: the sum of the losses in a micro-batch, and its weight."""


class GradientSync(Protocol):
    """Agreement between the ranks that share an effective batch."""

    def hold(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context around one micro-batch; gradients are reduced in the last only."""

    def total(self, numbers: "Tensor") -> "Tensor":
        """Return the sum of `numbers` over all ranks."""


class LocalSync:
    """One process: nothing to agree on."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def hold(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return self._nothing

    def total(self, numbers: "Tensor") -> "Tensor":
        """Return `numbers`: this rank's are all there are."""
        return numbers


class Runner(Protocol):
    """The way in which the micro-batches of one effective batch pass through the model."""

    def run(
        self,
        micro_batches: Iterable[Micro],
        forward: Callable[[Micro], Summed],
        backward: Callable[[Summed], None],
    ) -> None:
        """Run forward and backward of every micro-batch."""


class InTurn:
    """One micro-batch after the other, backward right after forward.

    Nothing of a micro-batch is alive when the next begins: no name is bound to its inputs or its
    loss here.
    """

    def run(
        self,
        micro_batches: Iterable[Micro],
        forward: Callable[[Micro], Summed],
        backward: Callable[[Summed], None],
    ) -> None:
        """Run backward right after the forward of each micro-batch."""
        for micro in micro_batches:
            backward(forward(micro))


class Check(Protocol):
    """A look at the first effective batch before it runs."""

    def __call__(self, effective: "EffectiveBatch") -> None:
        """Look at a few small samples; warn, but change nothing."""
