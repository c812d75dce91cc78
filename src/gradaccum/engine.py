"""The moves of an optimizer step: begin, add a micro-batch, close.

IDLE --begin--> SUMMING --close--> CLOSING --> IDLE
                   |                  |
                   +------ drop ------+------> IDLE, as if it had not begun
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from math import hypot, isfinite
from time import perf_counter
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.dtypes import Masters
from gradaccum.errors import LossError, NonFiniteError, PhaseError
from gradaccum.gradients import Gradients
from gradaccum.loss import Tally, Terms
from gradaccum.loss_scale import LossScale
from gradaccum.master_weights import MasterWeights
from gradaccum.outcome import Counters, Outcome, StepReport
from gradaccum.protocols import GradientSync
from gradaccum.update import Update, advance

Nonfinite = Literal["raise", "skip_step", "drop_micro_batch"]


_SETTLED = (Outcome.STEPPED, Outcome.SKIPPED_OVERFLOW)  # what a loss scale learns from


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
    dropped: list[int] = field(default_factory=list)  # those left out, counted from 0
    lr_scale: float = 1.0
    loss_scale: Tensor | None = None
    replaced: bool = False  # another effective batch began before this one was closed
    started: float = field(default_factory=perf_counter)

    @property
    def counts(self) -> dict[str, int]:
        """What is added up over ranks."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "padded_tokens": self.padded_tokens,
            "dropped": len(self.dropped),
        }

    @property
    def came(self) -> int:
        """Micro-batches so far, those that were left out included."""
        return self.micro_batches + len(self.dropped)


class Engine:
    """Sums gradients and makes the update; the one holder of what is open.

    Args:
        model: Whose parameters are trained, some of them or all.
        update: The optimizers and the clipping.
        schedulers: Moved once per update, and only then.
        averages: Called once per update, and only then: averages of the weights.
        sync: Agreement between ranks.
        nonfinite: What a gradient that is not finite does.
        scaler: Scales losses, so that gradients of half precision do not vanish.
        sum_dtype: The least of gradient sums.
        masters: What parameters of fewer bits than that are updated by.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        update: Update,
        schedulers: Sequence[LRScheduler],
        averages: Sequence[Callable[[], object]] = (),
        sync: GradientSync,
        nonfinite: Nonfinite,
        scaler: GradScaler | None = None,
        sum_dtype: torch.dtype = torch.float32,
        masters: Masters = Masters.NONE,
    ) -> None:
        self._update, self._schedulers = update, tuple(schedulers)
        self._averages = tuple(averages)
        self._sync, self._nonfinite = sync, nonfinite
        self._loss_scale: LossScale | None = None
        if scaler is not None and scaler.is_enabled():
            self._loss_scale = LossScale(scaler, update.optimizers[0])
        self._gradients = Gradients(model, update.optimizers, sum_dtype)
        self._masters: MasterWeights | None = None
        if masters is not Masters.NONE:
            self._masters = MasterWeights(update.optimizers, masters, sum_dtype)
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
        lr_scale: float = 1.0,
    ) -> Opened:
        """Open an effective batch. One that was left open is dropped.

        Args:
            weighed: Its weights by term of the loss, if it was weighed beforehand.
            samples: How many samples it has, if known already.
            tokens: Their summed lengths.
            padded_tokens: Positions that will be computed.
            lr_scale: What learning rates are multiplied by, for its one update.

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
            lr_scale=lr_scale,
        )
        return self.opened

    def add(self, *losses: Terms) -> None:
        """Add the gradient of a micro-batch; of several whose samples interact, in one backward.

        Args:
            losses: The loss of each.

        Raises:
            LossError: The loss carries weight, but depends on no parameter.
        """
        opened = self.opened or self._none_open()
        totals = [opened.tally.differentiable(terms) for terms in losses]
        total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
        if self._nonfinite == "drop_micro_batch" and not isfinite(total.item()):
            opened.dropped.append(opened.came)
            return
        if total.requires_grad:
            if self._loss_scale is not None:
                total = self._scaled(total, losses[0], self._loss_scale)
            self._gradients.add(total)
        elif any(float(term.weight) for terms in losses for term in terms.values()):
            raise LossError(
                "backward of a micro-batch",
                expected="a loss that depends on parameters that require a gradient",
                got="a sum without a graph",
                remedy="Return the sum undetached, and compute it with gradients enabled.",
            )
        for terms in losses:
            opened.tally.add(terms)
        opened.micro_batches += len(losses)

    def _scaled(self, total: Tensor, terms: Terms, by: LossScale) -> Tensor:
        """Return a loss as it goes backward: by the same scale in all of an effective batch."""
        opened = self.opened or self._none_open()
        if opened.loss_scale is None:
            first = next(iter(terms.values()))
            opened.loss_scale = by.factor(first, divided=opened.tally.divides)
        return total * opened.loss_scale

    def close(self) -> StepReport:
        """Divide, clip and step, all micro-batches being in; then move the schedulers.

        Returns:
            What the effective batch did.
        """
        report = self.conclude()
        self.advance()
        return report

    def advance(self) -> None:
        """Move averages and schedulers, if the last effective batch moved the parameters.

        It comes last of all: should one raise, the step is counted and told.
        """
        if self.report is not None and self.report.outcome.stepped:
            for average in self._averages:
                average()
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
        self._sync.reduce(self._gradients.parameters)
        sums = self._gradients.tensors()
        beside, scaled = self._update.norms(sums), opened.loss_scale
        if scaled is not None:
            beside = torch.cat([beside, scaled.to(beside).reshape(1)])
        mean, numbers = opened.tally.mean(self._sync.totals, beside)
        divisor = mean.divisor * (1.0 if scaled is None else numbers.pop())
        grad_norm = hypot(*numbers) / divisor if divisor else 0.0
        counts = self._sync.totals(opened.counts)
        outcome = self._outcome(mean.divisor, mean.loss, grad_norm, dropped=counts["dropped"] > 0)
        lr = self._update.lr * opened.lr_scale
        if self._loss_scale is not None and scaled is not None and outcome in _SETTLED:
            self._loss_scale.settle(overflow=not outcome.stepped, device=scaled.device)
        if outcome.stepped:
            self._move(sums, self._update.scales(divisor=divisor, norms=numbers), opened.lr_scale)
        self._done = self._done.after(
            outcome=outcome,
            micro_batches=opened.micro_batches,
            samples=int(counts["samples"]),
            tokens=int(counts["tokens"]),
        )
        self.drop()
        self.report = StepReport(
            outcome=outcome,
            loss=mean.loss,
            weight=mean.divisor,
            grad_norm=grad_norm,
            lr=lr,
            samples=int(counts["samples"]),
            tokens=int(counts["tokens"]),
            padded_tokens=int(counts["padded_tokens"]),
            micro_batches=opened.micro_batches,
            dropped=int(counts["dropped"]),
            optimizer_step=self._done.optimizer_steps,
            seconds=perf_counter() - opened.started,
            terms=mean.terms,
        )
        return self.report

    def _move(self, sums: Sequence[list[Tensor]], scales: Sequence[float], lr_scale: float) -> None:
        """Step the optimizers, by float32 copies of 16-bit parameters if there are any."""
        masters, narrow = self._masters, None
        if masters is None and self._gradients.wide:
            narrow = self._gradients.narrow
        step = self._done.optimizer_steps
        with nullcontext() if masters is None else masters.in_place(step):
            self._update(sums, scales=scales, lr_scale=lr_scale, narrow=narrow)

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

    def _outcome(self, weight: float, loss: float, grad_norm: float, *, dropped: bool) -> Outcome:
        opened = self.opened or self._none_open()
        if weight == 0:
            return Outcome.SKIPPED_NONFINITE if dropped else Outcome.SKIPPED_EMPTY
        if isfinite(grad_norm) and isfinite(loss):
            return Outcome.STEPPED
        if self._loss_scale is not None and self._loss_scale.can_be_lowered():
            return Outcome.SKIPPED_OVERFLOW
        if self._nonfinite != "raise":
            return Outcome.SKIPPED_NONFINITE
        where = ", ".join(map(str, opened.tally.nonfinite()))
        raise NonFiniteError(
            f"effective batch after optimizer step {self._done.optimizer_steps}",
            expected="a finite loss and gradient",
            got=f"loss {loss} and gradient norm {grad_norm}"
            + (f"; the loss of micro-batch {where} is not finite" if where else ""),
            remedy='Lower the learning rate, look for bad samples, or pass nonfinite="skip_step".',
        )
