"""A whole effective batch at a time: cut it, run it, and update, or leave everything as it was."""

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from gradaccum.batch import EffectiveBatch, WeighFunction, one_ahead
from gradaccum.culprit import Culprit
from gradaccum.engine import Engine
from gradaccum.errors import NonFiniteError
from gradaccum.feed import Feed
from gradaccum.loss import Tally, Terms, checked_terms
from gradaccum.memory import AllocatorBytes, Needs
from gradaccum.outcome import Evaluation, StepReport
from gradaccum.partition import Cut, FixedCut, Partition
from gradaccum.partition.policy import letting_through, with_bounds_of
from gradaccum.prepared import Prepared
from gradaccum.protocols import Check, GradientSync, LossFunction, Runner
from gradaccum.recovery import Recovery, TooLarge, is_out_of_memory
from gradaccum.sizing import Sizing
from gradaccum.snapshot import modes_kept
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
        needs: Predicts what is held whatever the size of a micro-batch.
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
        needs: Callable[[], Needs],
        loss: LossFunction,
        feed: Feed,
        sizing: Sizing,
        sync: GradientSync,
        runner: Runner,
        weigh: WeighFunction | None,
        check: Check | None,
    ) -> None:
        self._engine, self._model, self._update = engine, model, update
        self._needs = needs
        self._loss, self._feed, self._sizing = loss, feed, sizing
        self._sync, self._runner = sync, runner
        self._weigh, self._check = weigh, check
        self._recovery = Recovery(model)
        self._longest = 1  # of the effective batch that the cut was measured on

    @property
    def cut(self) -> Cut | None:
        """How effective batches are cut now; None before that is known."""
        return self._recovery.cut

    def step(self, batch: Any) -> StepReport:
        """Run one effective batch; see `Accumulator.step`."""
        prepared = Prepared.of(batch, self._feed.length, self._weigh, self._sync)
        cut = self._cut_for(prepared)
        if self._engine.report is None and prepared.samples:
            self._look_at_first(prepared, cut)
        started = perf_counter()
        try:
            attempt, learn = partial(self._attempt, prepared), len(prepared.samples) > 0
            done = self._recovery.run(cut, attempt, learn=learn)
        except NonFiniteError as error:
            raise self._explained(error, prepared) from None
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
        weigh = self._weigh if self._recovery.cut is None else None
        prepared = Prepared.of(batch, self._feed.length, weigh, self._sync)
        cut = self._recovery.cut or self._cut_for(prepared)
        with modes_kept(self._model):
            self._model.eval()
            attempt = partial(self._evaluated, prepared)
            return self._recovery.run(letting_through(cut), attempt, learn=False).value

    def _cut_for(self, prepared: Prepared) -> Cut:
        """Return how to cut an effective batch, measured if need be."""
        cut = self._recovery.cut
        if not prepared.samples:  # this rank has none
            return cut or FixedCut(size=1)
        return self._measured(prepared) if cut is None or self._outgrown(prepared) else cut

    def _measured(self, prepared: Prepared) -> Cut:
        """Find out how to cut, with an effective batch."""
        trial = EngineTrial(
            engine=self._engine,
            model=self._model,
            update=self._update,
            needs=self._needs,
            feed=self._feed,
            forward=self._forward,
            prepared=prepared,
        )
        cut = self._sizing(len(prepared.samples), prepared.lengths, trial)
        self._recovery.cut = cut = with_bounds_of(cut, self._recovery.cut)
        self._longest = prepared.longest
        return cut

    def _outgrown(self, prepared: Prepared) -> bool:
        """Return whether samples are far longer than those that the cut was measured on."""
        far = prepared.longest > _FAR * self._longest
        return far and self._sizing.measures and self._engine.opened is None

    def _look_at_first(self, prepared: Prepared, cut: Cut) -> None:
        """Refuse what could not be cut later, and look for samples that interact."""
        prepared.plan(cut)
        if prepared.samples.dataset_lengths is not None:
            cut.admit(prepared.samples.dataset_lengths)
        if self._check is not None:
            self._check(prepared.samples)
            self._check = None

    def _attempt(self, prepared: Prepared, cut: Cut) -> StepReport | TooLarge:
        """Run an effective batch up to the update; hold nothing of it if that fails."""
        engine, plan = self._engine, prepared.plan(cut)
        opened = engine.begin(
            weighed=prepared.weighed,
            samples=plan.num_samples,
            tokens=plan.tokens,
            padded_tokens=plan.padded_tokens,
            lr_scale=prepared.samples.lr_scale,
        )
        micro_batches = self._feed.micro_batches(prepared.samples, plan)
        try:
            with closing(_ahead(micro_batches)) as ahead:
                self._runner.run(ahead, self._forward, engine.add)
            for k in opened.dropped:
                positions, length = plan.micro_batches[k], plan.padded_length(k)
                opened.samples -= len(positions)
                opened.padded_tokens -= len(positions) * length
                opened.tokens -= 0 if plan.lengths is None else int(plan.lengths[positions].sum())
            return engine.conclude()
        except BaseException as error:
            if opened.came == len(plan) or not is_out_of_memory(error):
                engine.drop()
                raise
            failure = _too_large(prepared.samples, plan, opened.came, str(error))
        engine.drop()  # here no name is bound to the error, whose frames hold the activations
        return failure

    def _explained(self, error: NonFiniteError, prepared: Prepared) -> NonFiniteError:
        """Add where it came from, which takes another run; all is as before the step by now."""
        find = Culprit(model=self._model, feed=self._feed, forward=self._forward)
        cut = self._recovery.cut
        try:
            place = "" if cut is None else "; " + find(prepared, prepared.plan(cut))
        except Exception as failure:  # what a user's model does may fail in more ways than one
            place = f"; looking for its origin failed: {type(failure).__name__}"
        return NonFiniteError(
            error.call, expected=error.expected, got=error.got + place, remedy=error.remedy
        )

    def _evaluated(self, prepared: Prepared, cut: Cut) -> Evaluation | TooLarge:
        """Run forward passes alone."""
        plan, tally = prepared.plan(cut), Tally()
        came: list[Terms] = []
        try:
            with torch.no_grad():
                micro_batches = self._feed.micro_batches(prepared.samples, plan)
                self._runner.run(micro_batches, self._forward, lambda *losses: came.extend(losses))
        except RuntimeError as error:
            if len(came) == len(plan) or not is_out_of_memory(error):
                raise
            return _too_large(prepared.samples, plan, len(came), str(error))
        for terms in came:
            tally.add(terms)
        mean, _ = tally.mean(self._sync.totals)
        counts = self._sync.totals({"samples": plan.num_samples, "tokens": plan.tokens})
        return Evaluation(
            loss=mean.loss,
            weight=mean.divisor,
            samples=int(counts["samples"]),
            tokens=int(counts["tokens"]),
            terms=mean.terms,
        )

    def _forward(self, micro: Any) -> Terms:
        name = getattr(self._loss, "__name__", type(self._loss).__name__)
        return checked_terms(self._loss(self._model, micro), call=f"{name}(model, micro_batch)")


def _ahead(micro_batches: Iterable[M]) -> Generator[M, None, None]:
    """Hand micro-batches on, the next of which is on its way already."""
    for micro, _ in one_ahead(micro_batches):
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
        sample=effective.name(position),
        message=message,
    )
