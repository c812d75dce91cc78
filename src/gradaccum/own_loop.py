"""A loop of one's own: micro-batches handed out, and a backward awaited for each."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from gradaccum.batch import common_size, one_ahead
from gradaccum.engine import Engine, Opened
from gradaccum.errors import LossError, PhaseError
from gradaccum.loss import Loss, checked_terms
from gradaccum.outcome import Counters, StepReport
from gradaccum.partition import require_positive

M = TypeVar("M")


class OwnLoop:
    """Pairs each micro-batch of an iterable with one backward, and closes effective batches.

    Args:
        engine: Sums gradients and makes the update.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The effective batch whose micro-batch was handed out and awaits its backward, whether
        # that micro-batch is its last, and how many samples it has.
        self._awaited: Opened | None = None
        self._last, self._samples = False, 0

    def over(self, loader: Iterable[M], steps: int | Callable[[Counters], int]) -> Iterator[M]:
        """Iterate over micro-batches; see `Accumulator.over`."""
        if not callable(steps):
            require_positive("steps", steps, call=f"over(loader, steps={steps!r})")
        return self._over(loader, steps)

    def backward(self, sum: Tensor | Loss, weight: Tensor | float | None) -> StepReport | None:
        """Add the gradient of a micro-batch; see `Accumulator.backward`."""
        if self._awaited is None or self._awaited is not self._engine.opened:
            raise PhaseError(
                "accumulator.backward(...)",
                expected="one call for each micro-batch that accumulator.over(...) hands out",
                got="a call with no micro-batch waiting",
                remedy="Add the losses of one micro-batch and call backward once, in the loop.",
            )
        loss = _with_weight(sum, weight)
        try:
            self._engine.add(checked_terms(loss, call="accumulator.backward(sum, weight)"))
            opened, self._awaited = self._awaited, None
            if opened.came - 1 not in opened.dropped:
                opened.samples += self._samples
            return self._engine.close() if self._last else None
        except BaseException:
            self._engine.drop()
            raise

    def _over(self, loader: Iterable[M], steps: int | Callable[[Counters], int]) -> Iterator[M]:
        engine = self._engine
        opened: Opened | None = None
        handed = size = 0
        try:
            for micro, ends in one_ahead(loader):
                if opened is None:
                    size = steps(engine.counters) if callable(steps) else steps
                    require_positive("steps", size, call=f"steps(counters) -> {size!r}")
                    opened, handed = engine.begin(), 0
                handed += 1
                last = ends or handed == size
                self._awaited, self._last = opened, last
                self._samples = common_size(micro) or 0
                yield micro
                del micro
                if opened.replaced:
                    raise PhaseError(
                        "accumulator.over(...)",
                        expected="one effective batch at a time",
                        got="another that began in the middle of this one; its sums are dropped",
                        remedy="Finish the loop first, or use an accumulator of its own.",
                    )
                if last and engine.opened is opened:
                    self._close_without_last()
                if engine.opened is not opened:
                    opened = None
        finally:
            if opened is not None and engine.opened is opened:
                engine.drop()

    def _close_without_last(self) -> None:
        """Close an effective batch whose last micro-batch was left without a backward."""
        if self._engine.counters.micro_steps == 0:
            raise PhaseError(
                "accumulator.over(...)",
                expected="accumulator.backward(sum, weight=...) for each micro-batch",
                got="a whole effective batch without one, and none before it",
                remedy="Call it in place of loss.backward() and optimizer.step().",
            )
        self._engine.close()


def _with_weight(sum: Any, weight: Any) -> Any:
    """Return a sum and its weight as a loss, or what was given if it is to have its own."""
    if weight is not None:
        if isinstance(sum, Loss):
            raise LossError(
                "accumulator.backward(Loss(sum, weight), weight)",
                expected="one weight",
                got="the loss's own and another beside it",
                remedy="Leave weight out, or pass loss.sum.",
            )
        return Loss(sum, weight)
    if isinstance(sum, Tensor):
        raise LossError(
            "accumulator.backward(sum)",
            expected="the weight of the sum beside it",
            got="no weight",
            remedy="Pass weight=: the samples or tokens that the sum runs over.",
        )
    if isinstance(sum, Mapping):
        raise LossError(
            "accumulator.backward({...})",
            expected="one sum with one weight",
            got=f"the terms {', '.join(map(str, sum))}",
            remedy="Use accumulator.step(batch) with weigh=..., which knows the weights of "
            "the whole effective batch beforehand.",
        )
    return sum
