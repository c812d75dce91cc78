"""The accumulator: two doors to one engine.

`step` takes a whole effective batch; `over` and `backward` go with a loop of your own.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from gradaccum.batch import WeighFunction, one_ahead, weigh
from gradaccum.engine import Engine, Nonfinite, Phase
from gradaccum.errors import ArgumentError, PhaseError
from gradaccum.feed import Feed
from gradaccum.loss import Loss, Tally, Terms, checked_terms
from gradaccum.outcome import Counters, Evaluation, StepReport
from gradaccum.own_loop import OwnLoop
from gradaccum.protocols import Check, GradientSync, InTurn, LocalSync, LossFunction, Runner
from gradaccum.update import Update

M = TypeVar("M")


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
        nonfinite: Nonfinite = "raise",
    ) -> None:
        self._model, self._loss, self._feed = model, loss, feed
        self._weigh, self._check = weigh, check
        self._sync, self._runner = sync or LocalSync(), runner or InTurn()
        self._engine = Engine(
            model=model,
            update=update,
            schedulers=schedulers,
            sync=self._sync,
            nonfinite=nonfinite,
        )
        self._loop = OwnLoop(self._engine, self._sync)

    @property
    def phase(self) -> Phase:
        """Where this accumulator stands."""
        return self._engine.phase

    @property
    def counters(self) -> Counters:
        """What was done so far, the micro-batches of an open effective batch included."""
        return self._engine.counters

    @property
    def report(self) -> StepReport | None:
        """The report of the last effective batch; None before the first."""
        return self._engine.report

    def step(self, batch: Any) -> StepReport:
        """Run one effective batch through the model and update the parameters.

        If anything is raised before the update, in the user's loss function too, no parameter has
        moved, no gradient is held and the counters are as before.

        Args:
            batch: An effective batch of `gradaccum.effective_batches`, a list of samples, or
                collated tensors with the samples along their first dimension.

        Returns:
            What it did.
        """
        feed = self._needed_feed("step")
        effective, plan = feed.plan(batch)
        if effective.dataset_lengths is not None and self.report is None:
            feed.cut.admit(effective.dataset_lengths)
        weighed = None if self._weigh is None else weigh(effective, self._weigh)
        if self._check is not None:
            self._check(effective)
            self._check = None
        self._engine.begin(
            weighed=weighed,
            samples=plan.num_samples,
            tokens=plan.tokens,
            padded_tokens=plan.padded_tokens,
        )
        try:
            with closing(self._held(feed.micro_batches(effective, plan))) as micro_batches:
                self._runner.run(micro_batches, self._forward, self._engine.add)
            return self._engine.close()
        except BaseException:
            self._engine.drop()
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
                    tally.add(self._forward(micro))
        finally:
            for module, mode in modes:
                module.training = mode
        mean, _ = tally.mean(self._sync.total)
        return Evaluation(
            loss=mean.loss,
            weight=mean.divisor,
            samples=plan.num_samples,
            tokens=plan.tokens,
            terms=mean.terms,
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
        return self._loop.over(loader, steps)

    def backward(
        self, sum: Tensor | Loss, weight: Tensor | float | None = None
    ) -> StepReport | None:
        """Add the gradient of a micro-batch; update the parameters if it was the last.

        A sum without a weight is refused (`LossError`), and so are several terms: their weights
        over the whole effective batch cannot be known in a loop of your own. So is a call while
        no micro-batch of `over` awaits its backward (`PhaseError`).

        Args:
            sum: The summed loss of the micro-batch, not averaged; or a `Loss`.
            weight: What the sum is to be divided by; a `Loss` has its own.

        Returns:
            The report, if the effective batch is full; else None.
        """
        return self._loop.backward(sum, weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, as plain JSON.

        Returns:
            The state between two effective batches.

        Raises:
            PhaseError: An effective batch is open.
        """
        if self._engine.opened is not None:
            raise PhaseError(
                "accumulator.state_dict()",
                expected="no effective batch to be open",
                got=f"phase {self.phase.name}",
                remedy="Save between two effective batches.",
            )
        return {"counters": self.counters.as_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of another accumulator.

        Args:
            state: What `state_dict` returned.

        Raises:
            ArgumentError: It is something else.
        """
        try:
            self._engine.counters = Counters.from_dict(state["counters"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(
                "accumulator.load_state_dict(state)",
                expected="what accumulator.state_dict() returned",
                got=f"{type(error).__name__}: {error}",
                remedy="Load the state of an accumulator, not of a model or an optimizer.",
            ) from error

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
