"""What the engine needs from its parts, and the null object for "nothing".

The accumulator meets devices, ranks and checks through these alone. A part that does nothing is
an object that does nothing, so the engine has no branch for it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch.nn import Parameter

    from gradaccum.batch import EffectiveBatch
    from gradaccum.loss import Loss

Micro = TypeVar("Micro")
Summed = TypeVar("Summed")
K = TypeVar("K")

LossFunction = Callable[[Any, Any], "Loss | Mapping[str, Loss]"]
"""``loss(model, micro_batch)``: the sum of the losses in a micro-batch, and its weight."""


class GradientSync(Protocol):
    """Agreement between the ranks that share an effective batch.

    All ranks call `reduce` and `totals` alike, whatever micro-batches each of them has.
    """

    rank: int
    """This one, counted from 0."""

    ranks: int
    """How many there are."""

    def reduce(self, parameters: "Sequence[Parameter]") -> None:
        """Sum the gradients of these over all ranks, in ``.grad``."""

    def totals(self, numbers: Mapping[K, float]) -> Mapping[K, float]:
        """Return sums over all ranks; a rank that lacks a number adds nothing to it."""


class LocalSync:
    """One process: nothing to agree on."""

    rank, ranks = 0, 1

    def reduce(self, parameters: "Sequence[Parameter]") -> None:
        """Leave gradients as they are."""

    def totals(self, numbers: Mapping[K, float]) -> Mapping[K, float]:
        """Return `numbers`: this rank's are all there are."""
        return numbers


class Runner(Protocol):
    """The way in which the micro-batches of one effective batch pass through the model."""

    def run(
        self,
        micro_batches: Iterable[Micro],
        forward: Callable[[Micro], Summed],
        backward: Callable[..., None],
    ) -> None:
        """Run forward of every micro-batch, and backward for one of them or several at once."""


class InTurn:
    """One micro-batch after the other, backward right after forward.

    Nothing of a micro-batch is alive when the next begins: no name is bound to its inputs or its
    loss here.
    """

    def run(
        self,
        micro_batches: Iterable[Micro],
        forward: Callable[[Micro], Summed],
        backward: Callable[..., None],
    ) -> None:
        """Run backward right after the forward of each micro-batch."""
        for micro in micro_batches:
            backward(forward(micro))


class Check(Protocol):
    """A look at the first effective batch before it runs."""

    def __call__(self, effective: "EffectiveBatch") -> None:
        """Look at a few small samples; warn, but change nothing."""
