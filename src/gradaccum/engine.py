"""The moves of an optimizer step: begin, add a micro-batch, close.

IDLE --begin--> SUMMING --close--> CLOSING --> IDLE
                   |                  |
                   +------ drop ------+------> IDLE, as if it had not begun
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isfinite
from time import perf_counter
from typing import Literal, NoReturn

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.errors import LossError, NonFiniteError, PhaseError
from gradaccum.gradients import Gradients
from gradaccum.loss import Tally, Terms
from gradaccum.outcome import Counters, Outcome, StepReport
from gradaccum.protocols import GradientSync
from gradaccum.update import Update, advance, gradient_norm

Nonfinite = Literal["raise", "skip_step"]


class Phase(Enum):
    """Where an engine stands."""

    IDLE = auto()  # no gradient sums are held
    SUMMING = auto()  # some micro-batches are in; parameters must not move
    CLOSING = auto()  # all are in; the sums are scaled exactly once on the way to the step


@dataclass(slots=True, eq=False)
class Opened:
    """What is held of an effective batch while its micro-batches come in."""

    tally: Tally
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0
    replaced: bool = False  # another effective batch began before this one was closed
    started: float = field(default_factory=perf_counter)


class Engine:
    """Sums gradients and makes the update; the one holder of what is open.

    Args:
        model: Whose parameters are trained, some of them or all.
        update: The optimizers and the clipping.
        schedulers: Moved once per update, and only then.
        sync: Agreement between ranks.
        nonfinite: What a gradient that is not finite does.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        update: Update,
        schedulers: Sequence[LRScheduler],
        sync: GradientSync,
        nonfinite: Nonfinite,
    ) -> None:
        self._update, self._schedulers = update, tuple(schedulers)
        self._sync, self._nonfinite = sync, nonfinite
        self._gradients = Gradients(model, update.optimizers)
        self._done = Counters()
        self.phase = Phase.IDLE
        self.opened: Opened | None = None
        self.report: StepReport | None = None

    @property
    def counters(self) -> Counters:
        """What was done so far, the micro-batches of the open effective batch included."""
        opened = self.opened
        return self._done if opened is None else self._done.within(opened.micro_batches)

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._done = counters

    def begin(
        self,
        *,
        weighed: Mapping[str, float] | None = None,
        samples: int = 0,
        tokens: int = 0,
        padded_tokens: int = 0,
    ) -> Opened:
        """Open an effective batch. One that was left open is dropped.

        Args:
            weighed: Its weights by term of the loss, if it was weighed beforehand.
            samples: How many samples it has, if known already.
            tokens: Their summed lengths.
            padded_tokens: Positions that will be computed.

        Returns:
            What is held of it.
        """
        if self.opened is not None:
            self.opened.replaced = True
        self._gradients.clear()
        self.phase = Phase.SUMMING
        self.opened = Opened(
            tally=Tally(weighed),
            samples=samples,
            tokens=tokens,
            padded_tokens=padded_tokens,
        )
        return self.opened

    def add(self, terms: Terms) -> None:
        """Add the gradient of a micro-batch.

        Args:
            terms: Its loss.

        Raises:
            LossError: The loss carries weight, but depends on no parameter.
        """
        opened = self.opened or self._none_open()
        total = opened.tally.differentiable(terms)
        if total.requires_grad:
            self._gradients.add(total)
        elif any(float(term.weight) for term in terms.values()):
            raise LossError(
                "backward of a micro-batch",
                expected="a loss that depends on parameters that require a gradient",
                got="a sum without a graph",
                remedy="Return the sum undetached, and compute it with gradients enabled.",
            )
        opened.tally.add(terms)
        opened.micro_batches += 1

    def close(self) -> StepReport:
        """Divide, clip and step, all micro-batches being in; then move the schedulers.

        Returns:
            What the effective batch did.
        """
        report = self.conclude()
        self.advance()
        return report

    def advance(self) -> None:
        """Move the schedulers, if the last effective batch moved the parameters.

        It comes last of all: should one raise, the step is counted and told.
        """
        if self.report is not None and self.report.outcome.stepped:
            for scheduler in self._schedulers:
                advance(scheduler, self.report.loss)

    def conclude(self) -> StepReport:
        """Divide, clip and step, all micro-batches being in.

        Returns:
            What the effective batch did.
        """
        opened = self.opened or self._none_open()
        self.phase = Phase.CLOSING
        self._gradients.check()
        sums = self._gradients.tensors()
        mean, norm = opened.tally.mean(self._sync.total, gradient_norm(sums))
        grad_norm = norm / mean.divisor if mean.divisor else 0.0
        outcome = self._outcome(mean.divisor, mean.loss, grad_norm)
        lr = self._update.lr
        if outcome.stepped:
            scale = self._update.scale(weight=mean.divisor, grad_norm=grad_norm)
            self._update(sums, scale=scale)
        self._done = self._done.after(
            outcome=outcome,
            micro_batches=opened.micro_batches,
            samples=opened.samples,
            tokens=opened.tokens,
        )
        self.drop()
        self.report = StepReport(
            outcome=outcome,
            loss=mean.loss,
            weight=mean.divisor,
            grad_norm=grad_norm,
            lr=lr,
            samples=opened.samples,
            tokens=opened.tokens,
            padded_tokens=opened.padded_tokens,
            micro_batches=opened.micro_batches,
            optimizer_step=self._done.optimizer_steps,
            seconds=perf_counter() - opened.started,
            terms=mean.terms,
        )
        return self.report

    def drop(self) -> None:
        """Free the gradient sums and hold nothing."""
        self._gradients.free()
        self.phase, self.opened = Phase.IDLE, None

    def _none_open(self) -> NoReturn:
        raise PhaseError(
            "accumulator",
            expected="an open effective batch",
            got=f"phase {self.phase.name}",
            remedy="Begin one with step(batch) or over(loader, steps=...).",
        )

    def _outcome(self, weight: float, loss: float, grad_norm: float) -> Outcome:
        if weight == 0:
            return Outcome.SKIPPED_EMPTY
        if isfinite(grad_norm) and isfinite(loss):
            return Outcome.STEPPED
        if self._nonfinite == "skip_step":
            return Outcome.SKIPPED_NONFINITE
        raise NonFiniteError(
            f"effective batch after optimizer step {self._done.optimizer_steps}",
            expected="a finite loss and gradient",
            got=f"loss {loss} and gradient norm {grad_norm}",
            remedy='Lower the learning rate, look for bad samples, or pass nonfinite="skip_step".',
        )
