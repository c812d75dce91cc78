"""The engine: the micro-batches of one effective batch, then the update.

    IDLE --begin--> SUMMING --close--> CLOSING --> IDLE
                       |                  |
                       +---- abandon -----+------> IDLE, as if it had not begun

`step`, and `over` with `backward`, are two doors to the same moves.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isfinite
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.batch import WeighFunction, common_size, one_ahead, weigh
from gradaccum.errors import ArgumentError, LossError, NonFiniteError, PhaseError
from gradaccum.feed import Feed
from gradaccum.gradients import Gradients
from gradaccum.loss import Loss, Tally, Terms, checked_terms
from gradaccum.outcome import Counters, Evaluation, Outcome, StepReport
from gradaccum.partition import require_positive
from gradaccum.protocols import Check, GradientSync, InTurn, LocalSync, LossFunction, Runner
from gradaccum.update import Update, advance

M = TypeVar("M")


class Phase(Enum):
    """Where an accumulator stands."""

    IDLE = auto()  # no gradient sums are held
    SUMMING = auto()  # some micro-batches are in; parameters must not move
    CLOSING = auto()  # all are in; the sums are scaled exactly once on the way to the step


@dataclass(slots=True)
class _Open:
    """What is held of the effective batch that is open."""

    tally: Tally
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    micro_batches: int = 0
    awaited: bool = False  # a micro-batch of `over` is out whose backward has not come
    last: bool = False  # and no other will follow it
    cut_off: bool = False  # another effective batch began before this one was closed
    started: float = field(default_factory=perf_counter)


class Accumulator:
    """Accumulates gradients over micro-batches and makes the update of the full batch.

    Takes its parts one by one; `gradaccum.accumulator` builds them from what you have.

    Args:
        model: What `loss` is called with.
        update: The optimizers and the clipping.
        loss: ``loss(model, micro_batch)``; `step` and `evaluate` need it.
        feed: How effective batches are cut, collated and moved; `step` and `evaluate` need it.
        schedulers: Moved once per update, and only then.
        weigh: Weight of a sample, by term of the loss; needed for several terms.
        sync: Agreement between ranks.
        runner: How micro-batches pass through the model.
        check: A look at the first effective batch.
        nonfinite: What a gradient that is not finite does: ``"raise"`` or ``"skip_step"``.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        update: Update,
        loss: LossFunction | None = None,
        feed: Feed | None = None,
        schedulers: Sequence[LRScheduler] = (),
        weigh: WeighFunction | None = None,
        sync: GradientSync | None = None,
        runner: Runner | None = None,
        check: Check | None = None,
        nonfinite: Literal["raise", "skip_step"] = "raise",
    ) -> None:
        self._model, self._loss, self._update, self._feed = model, loss, update, feed
        self._schedulers, self._weigh = tuple(schedulers), weigh
        self._sync, self._runner = sync or LocalSync(), runner or InTurn()
        self._check, self._nonfinite = check, nonfinite
        self._gradients = Gradients(update.optimizers)
        self._phase, self._open = Phase.IDLE, None  # type: tuple[Phase, _Open | None]
        self._counters = Counters()
        self._report: StepReport | None = None

    @property
    def phase(self) -> Phase:
        """Where this accumulator stands."""
        return self._phase

    @property
    def counters(self) -> Counters:
        """What was done so far, the open effective batch's micro-batches included."""
        opened = self._open
        return self._counters if opened is None else self._counters.within(opened.micro_batches)

    @property
    def report(self) -> StepReport | None:
        """The report of the last effective batch; None before the first."""
        return self._report

    def step(self, batch: Any) -> StepReport:
        """Run one effective batch through the model and update the parameters.

        If anything is raised, in the user's loss function too, no parameter has moved, no
        gradient is held and the counters are as before.

        Args:
            batch: An effective batch of `gradaccum.effective_batches`, a list of samples, or
                collated tensors with the samples along their first dimension.

        Returns:
            What it did.
        """
        feed = self._needed_feed("step")
        effective, plan = feed.plan(batch)
        if effective.dataset_lengths is not None and not self._counters.micro_steps:
            feed.cut.admit(effective.dataset_lengths)
        weighed = None if self._weigh is None else weigh(effective, self._weigh)
        if self._check is not None:
            self._check(effective)
            self._check = None
        opened = self._begin(weighed)
        opened.samples, opened.tokens = plan.num_samples, plan.tokens
        opened.padded_tokens = plan.padded_tokens
        try:
            with closing(self._held(feed.micro_batches(effective, plan))) as micro_batches:
                self._runner.run(micro_batches, self._forward, self._add)
            return self._close()
        except BaseException:
            self._rest()
            raise

    def evaluate(self, batch: Any) -> Evaluation:
        """Return the mean loss of some samples in evaluation mode, without gradients.

        May be called in the middle of an effective batch; nothing of it changes. The modes of
        all modules are put back.

        Args:
            batch: As for `step`, and cut in the same way.

        Returns:
            The mean loss over all samples.
        """
        feed = self._needed_feed("evaluate")
        effective, plan = feed.plan(batch)
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        tally = Tally()
        try:
            with torch.no_grad():
                for micro in feed.micro_batches(effective, plan):
                    tally = tally.plus(self._forward(micro))
        finally:
            for module, mode in modes:
                module.training = mode
        mean, _ = tally.mean(self._sync.total)
        return Evaluation(
            loss=mean.loss, samples=plan.num_samples, tokens=plan.tokens, terms=mean.terms
        )

    def over(self, loader: Iterable[M], *, steps: int | Callable[[Counters], int]) -> Iterator[M]:
        """Iterate over micro-batches, `steps` of them to an effective batch.

        Call `backward` once for each. The last effective batch is closed when the loader ends,
        be it full or not. Leaving the loop in the middle of an effective batch drops its sums.

        Args:
            loader: Any iterable of micro-batches, with or without a length; read one ahead.
            steps: Accumulation steps of an effective batch. A function is asked at the start of
                each, with the counters so far.

        Returns:
            The loader's micro-batches, as they are.
        """
        if not callable(steps):
            require_positive("steps", steps, call=f"over(loader, steps={steps!r})")
        return self._over(loader, steps)

    def backward(
        self, sum: Tensor | Loss, weight: Tensor | float | None = None
    ) -> StepReport | None:
        """Add the gradient of a micro-batch; update the parameters if it was the last.

        Args:
            sum: The summed loss of the micro-batch, not averaged; or a `Loss`.
            weight: What the sum is to be divided by; a `Loss` has its own.

        Returns:
            The report, if the effective batch is full; else None.

        Raises:
            PhaseError: No micro-batch of `over` awaits its backward.
            LossError: The weight is missing, or there are several terms: their weights over the
                whole effective batch cannot be known in a loop of your own.
        """
        opened = self._open
        if opened is None or not opened.awaited:
            raise PhaseError(
                "accumulator.backward(...)",
                expected="one call for each micro-batch that accumulator.over(...) hands out",
                got="a call with no micro-batch waiting",
                remedy="Add the losses of one micro-batch and call backward once, in the loop.",
            )
        if isinstance(sum, Tensor) and weight is None:
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
        loss = sum if weight is None else Loss(sum, weight)  # type: ignore[arg-type]  # see below
        try:
            self._add(checked_terms(loss, call="accumulator.backward(sum, weight)"))
            opened.awaited = False
            return self._close() if opened.last else None
        except BaseException:
            self._rest()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, as plain JSON.

        Returns:
            The state between two effective batches.

        Raises:
            PhaseError: An effective batch is open.
        """
        if self._open is not None:
            raise PhaseError(
                "accumulator.state_dict()",
                expected="no effective batch to be open",
                got=f"phase {self._phase.name}",
                remedy="Save between two effective batches.",
            )
        return {"counters": self._counters.as_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of another accumulator.

        Args:
            state: What `state_dict` returned.
        """
        self._counters = Counters(**state["counters"])

    def _needed_feed(self, method: str) -> Feed:
        if self._loss is not None and self._feed is not None:
            return self._feed
        raise ArgumentError(
            f"accumulator.{method}(batch)",
            expected="an accumulator that knows the loss function and how to cut",
            got="no loss function" if self._loss is None else "no size of a micro-batch",
            remedy="Build it with accumulator(model, optimizer, loss, micro_batch_tokens=8192), "
            "or drive your own loop with accumulator.over(loader, steps=...).",
        )

    def _forward(self, micro: Any) -> Terms:
        loss: Any = self._loss
        name = getattr(loss, "__name__", type(loss).__name__)
        return checked_terms(loss(self._model, micro), call=f"{name}(model, micro_batch)")

    def _held(self, micro_batches: Iterable[M]) -> Generator[M, None, None]:
        """Hand micro-batches on; ranks reduce their gradients in the last alone."""
        for micro, last in one_ahead(micro_batches):
            with self._sync.hold(last=last):
                yield micro
            del micro

    def _over(self, loader: Iterable[M], steps: int | Callable[[Counters], int]) -> Iterator[M]:
        opened: _Open | None = None
        handed = size = 0
        try:
            for micro, ends in one_ahead(loader):
                if opened is None:
                    size = steps(self._counters) if callable(steps) else steps
                    require_positive("steps", size, call=f"steps(counters) -> {size!r}")
                    opened, handed = self._begin(), 0
                handed += 1
                opened.samples += common_size(micro) or 0
                opened.awaited, opened.last = True, ends or handed == size
                with self._sync.hold(last=opened.last):
                    yield micro
                del micro
                if opened.cut_off:
                    raise PhaseError(
                        "accumulator.over(...)",
                        expected="one effective batch at a time",
                        got="another that began in the middle of this one; its sums are dropped",
                        remedy="Finish the loop first, or use an accumulator of its own.",
                    )
                if self._open is opened and opened.last:
                    self._close()  # the last micro-batch was left without a backward
                if self._open is not opened:
                    opened = None
        finally:
            if opened is not None and self._open is opened:
                self._rest()

    def _begin(self, weighed: Mapping[str, float] | None = None) -> _Open:
        if self._open is not None:  # left behind by a loop that something ended
            self._open.cut_off = True
            self._rest()
        self._gradients.clear()
        self._phase = Phase.SUMMING
        self._open = _Open(tally=Tally(weighed=weighed))
        return self._open

    def _add(self, terms: Terms) -> None:
        opened: Any = self._open
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
        opened.tally = opened.tally.plus(terms)
        opened.micro_batches += 1

    def _close(self) -> StepReport:
        opened: Any = self._open
        self._phase = Phase.CLOSING
        mean, norm = opened.tally.mean(self._sync.total, self._gradients.norm())
        grad_norm = norm / mean.divisor if mean.divisor else 0.0
        outcome = self._outcome(mean.divisor, mean.loss, grad_norm)
        lr = self._update.lr
        if outcome.stepped:
            scale = self._update.scale(weight=mean.divisor, grad_norm=grad_norm)
            self._update(self._gradients.tensors(), scale=scale)
            for scheduler in self._schedulers:
                advance(scheduler, mean.loss)
        self._counters = self._counters.after(
            outcome=outcome,
            micro_batches=opened.micro_batches,
            samples=opened.samples,
            tokens=opened.tokens,
        )
        self._rest()
        self._report = StepReport(
            outcome=outcome,
            loss=mean.loss,
            weight=mean.divisor,
            grad_norm=grad_norm,
            lr=lr,
            samples=opened.samples,
            tokens=opened.tokens,
            padded_tokens=opened.padded_tokens,
            micro_batches=opened.micro_batches,
            optimizer_step=self._counters.optimizer_steps,
            seconds=perf_counter() - opened.started,
            terms=mean.terms,
        )
        return self._report

    def _rest(self) -> None:
        self._gradients.clear()
        self._phase, self._open = Phase.IDLE, None

    def _outcome(self, weight: float, loss: float, grad_norm: float) -> Outcome:
        if weight == 0:
            return Outcome.SKIPPED_EMPTY
        if isfinite(grad_norm) and isfinite(loss):
            return Outcome.STEPPED
        if self._nonfinite == "skip_step":
            return Outcome.SKIPPED_NONFINITE
        raise NonFiniteError(
            f"effective batch after optimizer step {self._counters.optimizer_steps}",
            expected="a finite loss and gradient",
            got=f"loss {loss} and gradient norm {grad_norm}",
            remedy='Lower the learning rate, look for bad samples, or pass nonfinite="skip_step".',
        )
