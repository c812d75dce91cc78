"""Micro-batches that run as in an effective batch, measured, whose gradients are thrown away."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradaccum.engine import Engine
from gradaccum.errors import PhaseError
from gradaccum.feed import Feed
from gradaccum.loss import Terms
from gradaccum.memory import Budget, Enforced, LiveBytes, Needs, Probe
from gradaccum.prepared import Prepared
from gradaccum.probing import watched
from gradaccum.recovery import is_out_of_memory
from gradaccum.snapshot import preserved
from gradaccum.tree import flat
from gradaccum.update import Update


class EngineTrial:
    """Runs micro-batches of an effective batch through the engine that will train on them.

    What is measured is the middle of an effective batch: gradient sums are there and are added to,
    and another micro-batch waits on the device. One that needs more than the budget is stopped
    there, also where no device does so.

    Args:
        engine: Sums gradients; nothing may be open in it.
        model: Its random generators, buffers and modes are put back.
        update: The optimizers.
        needs: Predicts what is held whatever the size of a micro-batch.
        feed: Collates micro-batches.
        forward: From a micro-batch to its loss.
        prepared: Where samples are taken from.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        model: nn.Module,
        update: Update,
        needs: Callable[[], Needs],
        feed: Feed,
        forward: Callable[[Any], Terms],
        prepared: Prepared,
    ) -> None:
        self._engine, self._model, self._update = engine, model, update
        self._feed, self._forward = feed, forward
        self._prepared = prepared
        self._predicted_needs = needs
        self._needs: Needs | None = None
        self._steady = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open an effective batch that is dropped at the end.

        Yields:
            Nothing.

        Raises:
            PhaseError: An effective batch is open already.
        """
        if self._engine.opened is not None:
            raise PhaseError(
                "finding out how much memory a micro-batch needs",
                expected="no effective batch to be open",
                got=f"phase {self._engine.phase.name}",
                remedy="Call step or evaluate before a loop of your own, or pass micro_batch_size.",
            )
        # What asks may be an evaluation, without gradients and in evaluation mode.
        with preserved(self._model), torch.inference_mode(False), torch.enable_grad():
            if not self._model.training:
                self._model.train()
            held = [(p, p.grad) for p in self._model.parameters()]  # of a loop by hand, before
            self._begin()
            try:
                yield
            finally:
                self._engine.drop()
                for parameter, gradient in held:
                    parameter.grad = gradient

    def needs(self) -> Needs:
        """Return what is held whatever the size of a micro-batch."""
        if self._needs is None:
            self._needs = self._predicted_needs()
        return self._needs

    def probe(self, positions: np.ndarray, budget: Budget | None = None) -> Probe | None:
        """Return what a micro-batch of the samples at these positions needs.

        Args:
            positions: In the effective batch.
            budget: The most bytes that may be alive, parameters and optimizer state included.

        Returns:
            None if the budget or the device has not enough memory for it.
        """
        limit = None
        if budget is not None:
            needs = self.needs()
            # There in a step, but not here.
            elsewhere = needs.optimizer_state + needs.snapshot + needs.averages
            limit = Enforced(Budget(bytes=budget.bytes - elsewhere))
        try:
            if not self._steady:  # the first backward makes the gradient sums
                self._watched(positions, limit)
                self._steady = True
            return self._watched(positions, limit)
        except Exception as error:
            self._begin()  # a part of its gradient may have been added
            if not is_out_of_memory(error):
                raise
            return None

    def _begin(self) -> None:
        self._engine.begin(weighed=self._prepared.weighed)
        self._steady = False

    def _watched(self, positions: np.ndarray, limit: Enforced | None) -> Probe:
        live = LiveBytes(limit, device=self._feed.device)
        micro, waiting = (self._feed.peek(self._prepared.samples, positions.tolist()) for _ in "12")
        return watched(
            live,
            held=[*self._model.parameters(), *self._model.buffers(), *self._sums()],
            inputs=[leaf for leaf in flat((micro, waiting)) if isinstance(leaf, Tensor)],
            run=partial(self._run, micro, live),
            count=len(positions),
            length=self._prepared.padded(positions),
        )

    def _run(self, micro: Any, meter: LiveBytes) -> int:
        """Run forward and backward; return the live bytes between the two."""
        terms = self._forward(micro)
        kept = meter.live
        self._engine.add(terms)
        return kept

    def _sums(self) -> list[Tensor]:
        held = (p for o in self._update.optimizers for g in o.param_groups for p in g["params"])
        return [p.grad for p in held if p.grad is not None]
