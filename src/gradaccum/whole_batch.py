"""A whole effective batch at a time: cut it, run it, and update, or leave everything as it was."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from gradaccum.batch import EffectiveBatch, WeighFunction, effective_batch, one_ahead, weigh
from gradaccum.engine import Engine
from gradaccum.errors import SampleTooLargeError
from gradaccum.feed import Feed
from gradaccum.loss import Tally, Terms, checked_terms
from gradaccum.memory import AllocatorBytes
from gradaccum.outcome import Evaluation, StepReport
from gradaccum.partition import Cut, FixedCut, Partition, with_bounds_of
from gradaccum.protocols import Check, GradientSync, LossFunction, Runner
from gradaccum.recovery import Recovery, TooLarge, is_out_of_memory
from gradaccum.sizing import Sizing
from gradaccum.trial import EngineTrial
from gradaccum.update import Update

M = TypeVar("M")

_FAR = 2  # times as long: what was measured is then measured again


class WholeBatch:
    """Runs effective batches through the model, as transactions.

    Args:
        engine: Sums gradients and makes the update.
        model: What `loss` is called with.
        update: The optimizers, whose needs count where micro-batches are sized by a budget.
        loss: ``loss(model, micro_batch)``.
        feed: How samples are collated and moved.
        sizing: How large micro-batches may be.
        sync: Agreement between ranks.
        runner: How micro-batches pass through the model.
        weigh: Weight of a sample, by term of the loss.
        check: A look at the first effective batch.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        model: nn.Module,
        update: Update,
        loss: LossFunction,
        feed: Feed,
        sizing: Sizing,
        sync: GradientSync,
        runner: Runner,
        weigh: WeighFunction | None,
        check: Check | None,
    ) -> None:
        self._engine, self._model, self._update = engine, model, update
        self._loss, self._feed, self._sizing = loss, feed, sizing
        self._sync, self._runner = sync, runner
        self._weigh, self._check = weigh, check
        self._recovery = Recovery(model)
        self._longest = 0  # of the effective batch that the cut was measured on

    @property
    def cut(self) -> Cut | None:
        """How effective batches are cut now; None before that is known."""
        return self._recovery.cut

    def step(self, batch: Any) -> StepReport:
        """Run one effective batch; see `Accumulator.step`."""
        effective = effective_batch(batch)
        weighed = None if self._weigh is None else weigh(effective, self._weigh)
        cut = self._cut_for(effective, weighed, training=True)
        if self._engine.report is None:
            self._look_at_first(effective, cut)
        started = perf_counter()
        done = self._recovery.run(cut, partial(self._attempt, effective, weighed), learn=True)
        report = done.value
        if done.replays:
            report = replace(report, replays=done.replays, seconds=perf_counter() - started)
        if self._feed.device.type == "cuda":
            meter = AllocatorBytes(self._feed.device)
            report = replace(report, peak_allocated=meter.peak, peak_reserved=meter.reserved)
        self._engine.report = report
        self._engine.advance()
        return report

    def evaluate(self, batch: Any) -> Evaluation:
        """Return the mean loss of some samples; see `Accumulator.evaluate`."""
        effective = effective_batch(batch)
        weighed = None if self._weigh is None else weigh(effective, self._weigh)
        cut = self._cut_for(effective, weighed, training=False)
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            return self._recovery.run(cut, partial(self._evaluated, effective), learn=False).value
        finally:
            for module, mode in modes:
                module.training = mode

    def _cut_for(
        self, effective: EffectiveBatch, weighed: Mapping[str, float] | None, *, training: bool
    ) -> Cut:
        """Return how to cut, which is found out with the first effective batch."""
        cut = self._recovery.cut
        if cut is not None and not (training and self._outgrown(effective)):
            return cut
        lengths = effective.lengths(self._feed.length)
        trial = EngineTrial(
            engine=self._engine,
            model=self._model,
            update=self._update,
            feed=self._feed,
            forward=self._forward,
            sync=self._sync,
            effective=effective,
            weighed=weighed,
        )
        new = self._sizing(len(effective), lengths, trial)
        self._recovery.cut = cut = with_bounds_of(new, cut)
        self._longest = 0 if lengths is None else int(lengths.max())
        return cut

    def _outgrown(self, effective: EffectiveBatch) -> bool:
        """Return whether samples are far longer than those that the cut was measured on."""
        if not self._sizing.measures or self._engine.opened is not None:
            return False
        lengths = effective.lengths(self._feed.length)
        return lengths is not None and int(lengths.max()) > _FAR * max(self._longest, 1)

    def _look_at_first(self, effective: EffectiveBatch, cut: Cut) -> None:
        """Refuse what could not be cut later, and look for samples that interact."""
        self._feed.plan(effective, cut)
        if effective.dataset_lengths is not None:
            cut.admit(effective.dataset_lengths)
        if self._check is not None:
            self._check(effective)
            self._check = None

    def _attempt(
        self, effective: EffectiveBatch, weighed: Mapping[str, float] | None, cut: Cut
    ) -> StepReport | TooLarge:
        """Run an effective batch up to the update; hold nothing of it if that fails."""
        engine, plan = self._engine, self._feed.plan(effective, cut)
        opened = engine.begin(
            weighed=weighed,
            samples=plan.num_samples,
            tokens=plan.tokens,
            padded_tokens=plan.padded_tokens,
        )
        try:
            with closing(self._held(self._feed.micro_batches(effective, plan))) as micro_batches:
                self._runner.run(micro_batches, self._forward, engine.add)
            return engine.conclude()
        except BaseException as error:
            if opened.micro_batches == len(plan) or not is_out_of_memory(error):
                engine.drop()
                raise
            failure = _too_large(effective, plan, opened.micro_batches, str(error))
        engine.drop()  # here no name is bound to the error, whose frames hold the activations
        return failure

    def _evaluated(self, effective: EffectiveBatch, cut: Cut) -> Evaluation | TooLarge:
        """Run forward passes alone."""
        tally, at = Tally(), 0
        try:
            plan = self._feed.plan(effective, cut)
        except SampleTooLargeError:  # for training; without a backward it may well fit
            plan = self._feed.plan(effective, FixedCut(size=1))
        try:
            with torch.no_grad():
                for micro in self._feed.micro_batches(effective, plan):
                    tally.add(self._forward(micro))
                    at += 1
        except RuntimeError as error:
            if at == len(plan) or not is_out_of_memory(error):
                raise
            return _too_large(effective, plan, at, str(error))
        mean, _ = tally.mean(self._sync.total)
        return Evaluation(
            loss=mean.loss,
            weight=mean.divisor,
            samples=plan.num_samples,
            tokens=plan.tokens,
            terms=mean.terms,
        )

    def _forward(self, micro: Any) -> Terms:
        name = getattr(self._loss, "__name__", type(self._loss).__name__)
        return checked_terms(self._loss(self._model, micro), call=f"{name}(model, micro_batch)")

    def _held(self, micro_batches: Iterable[M]) -> Generator[M, None, None]:
        """Hand micro-batches on; ranks reduce their gradients in the last alone."""
        for micro, last in one_ahead(micro_batches):
            with self._sync.hold(last=last):
                yield micro
            del micro


def _too_large(effective: EffectiveBatch, plan: Partition, at: int, message: str) -> TooLarge:
    """Describe a micro-batch that did not fit."""
    positions = plan.micro_batches[at]
    longest = 0 if plan.lengths is None else int(plan.lengths[positions].argmax())
    position = int(positions[longest])
    return TooLarge(
        count=len(positions),
        length=max(plan.padded_length(at), 1),
        sample=f"sample {position} of the effective batch"
        if effective.indices is None
        else f"sample {effective.indices[position]}",
        message=message,
    )
