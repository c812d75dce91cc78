"""The accumulator: two doors to one engine.

`step` takes a whole effective batch; `over` and `backward` go with a loop of your own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from gradaccum.batch import WeighFunction
from gradaccum.dtypes import Masters
from gradaccum.engine import Engine, Nonfinite, Phase
from gradaccum.errors import ArgumentError, PhaseError
from gradaccum.feed import Feed
from gradaccum.loss import Loss
from gradaccum.memory import needs_of
from gradaccum.outcome import Counters, Evaluation, StepReport
from gradaccum.own_loop import OwnLoop
from gradaccum.partition import Cut
from gradaccum.protocols import Check, GradientSync, InTurn, LocalSync, LossFunction, Runner
from gradaccum.sizing import Sizing
from gradaccum.update import Update
from gradaccum.whole_batch import WholeBatch

M = TypeVar("M")


class Accumulator:
    """Accumulates gradients over micro-batches and makes the update of the full batch.

    Takes its parts one by one; `gradaccum.accumulator` builds them from what you have.

    Args:
        model: What `loss` is called with.
        update: The optimizers and the clipping.
        loss: ``loss(model, micro_batch)``; `step` and `evaluate` need it, and the next two.
        feed: How samples are collated and moved.
        sizing: How large micro-batches may be.
        schedulers: Moved once per update, and only then.
        weigh: Weight of a sample, by term of the loss; needed for several terms.
        sync: Agreement between ranks.
        runner: How micro-batches pass through the model.
        check: A look at the first effective batch.
        nonfinite: What a loss or gradient that is not finite does: ``"raise"``, ``"skip_step"``
            or ``"drop_micro_batch"``.
        averages: Averages of the weights, each with the module that it averages; they move once
            per update, and only then.
        scaler: Scales losses of half precision.
        sum_dtype: The least of gradient sums.
        masters: What parameters of fewer bits than that are updated by.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        update: Update,
        loss: LossFunction | None = None,
        feed: Feed | None = None,
        sizing: Sizing | None = None,
        schedulers: Sequence[LRScheduler] = (),
        weigh: WeighFunction | None = None,
        sync: GradientSync | None = None,
        runner: Runner | None = None,
        check: Check | None = None,
        nonfinite: Nonfinite = "raise",
        averages: Sequence[tuple[AveragedModel, nn.Module]] = (),
        scaler: GradScaler | None = None,
        sum_dtype: torch.dtype = torch.float32,
        masters: Masters = Masters.NONE,
    ) -> None:
        sync, runner = sync or LocalSync(), runner or InTurn()
        self._engine = Engine(
            model=model,
            update=update,
            schedulers=schedulers,
            averages=[partial(one.update_parameters, source) for one, source in averages],
            sync=sync,
            nonfinite=nonfinite,
            scaler=scaler,
            sum_dtype=sum_dtype,
            masters=masters,
        )
        self._loop = OwnLoop(self._engine)
        self._whole: WholeBatch | None = None
        if loss is not None and feed is not None and sizing is not None:
            self._whole = WholeBatch(
                engine=self._engine,
                model=model,
                update=update,
                needs=partial(
                    needs_of,
                    model,
                    update.optimizers,
                    sum_dtype=sum_dtype,
                    masters=masters,
                    averages=[average for average, _ in averages],
                ),
                loss=loss,
                feed=feed,
                sizing=sizing,
                sync=sync,
                runner=runner,
                weigh=weigh,
                check=check,
            )

    @property
    def phase(self) -> Phase:
        """Where this accumulator stands."""
        return self._engine.phase

    @property
    def counters(self) -> Counters:
        """What was done so far, the micro-batches of an open effective batch included."""
        return self._engine.counters

    @property
    def cut(self) -> Cut | None:
        """How `step` and `evaluate` cut now; None before the first effective batch."""
        return None if self._whole is None else self._whole.cut

    @property
    def report(self) -> StepReport | None:
        """The report of the last effective batch; None before the first."""
        return self._engine.report

    def step(self, batch: Any) -> StepReport:
        """Run one effective batch through the model and update the parameters.

        It is a transaction. If the device runs out of memory, the same samples are run again in
        smaller micro-batches, from the same random numbers and buffers. If anything else is raised
        before the update, in your loss function too, no parameter has moved, no gradient is held,
        and counters, buffers and random generators are as before.

        Args:
            batch: An effective batch of `gradaccum.effective_batches`, a list of samples, or
                collated tensors with the samples along their first dimension.

        Returns:
            What it did.
        """
        return self._needed("step").step(batch)

    def evaluate(self, batch: Any) -> Evaluation:
        """Return the mean loss of some samples in evaluation mode, without gradients.

        May be called in the middle of an effective batch; nothing of it changes. The modes of
        all modules are put back.

        Args:
            batch: As for `step`, and cut in the same way.

        Returns:
            The mean loss over all samples.
        """
        return self._needed("evaluate").evaluate(batch)

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

    def _needed(self, method: str) -> WholeBatch:
        if self._whole is not None:
            return self._whole
        raise ArgumentError(
            f"accumulator.{method}(batch)",
            expected="an accumulator that knows the loss function",
            got="none",
            remedy="Build it with accumulator(model, optimizer, loss), or drive your own loop "
            "with accumulator.over(loader, steps=...).",
        )
