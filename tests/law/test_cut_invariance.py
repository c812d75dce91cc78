"""The law: one optimizer step depends on the effective batch alone, not on how it was cut."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law.models import CASES, Case
from law.twin import Step, full_batch_step
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

import gradaccum as ga
from gradaccum.accumulator import Accumulator
from gradaccum.collate import collate_function
from gradaccum.feed import Feed
from gradaccum.partition import Partition
from gradaccum.sizing import Told
from gradaccum.update import Update

EXACT = 1e-10  # relative, in float64

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "adam fused": lambda p: Adam(p, lr=0.01, fused=True),
}
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler] | None] = {
    "none": None,
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.7),
    "warm-up": lambda optimizer: LambdaLR(optimizer, lambda step: (step + 1) / 4),
}


@dataclass(frozen=True)
class RandomCut:
    """Any partition, in any order: cuts a random permutation at random places."""

    rng: np.random.Generator

    def __call__(self, num_samples, lengths, *, indices=None):
        order = self.rng.permutation(num_samples)
        inner = np.flatnonzero(self.rng.random(num_samples - 1) < 0.5) + 1
        return Partition(micro_batches=tuple(np.split(order, inner)), lengths=lengths)

    def admit(self, lengths):
        """Any sample fits."""

    def relaxed(self):
        """It is at random anyway."""
        return self


def close(found: Any, expected: Any) -> None:
    """Assert that numbers are equal, or tensors relative to their largest element."""
    if isinstance(found, list):
        for one, other in zip(found, expected, strict=True):
            bound = EXACT * float(other.abs().max()) + 1e-15
            torch.testing.assert_close(one, other, rtol=0, atol=bound)
    else:
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=1e-13)


class Watched:
    """Keeps the gradients that an optimizer sees."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.gradients: list[list[Tensor]] = []
        self._parameters = list(model.parameters())
        optimizer.register_step_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.gradients.append(
            [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._parameters]
        )


@dataclass
class Both:
    """A model and its twin, the same samples for both, and what the twin did."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    batches: list[list[Any]]
    expected: list[Step]
    max_grad_norm: float | None


def both(case: Case, seed: int, optimizer: str, scheduler: str, clip: float | None) -> Both:
    """Draw a model and three effective batches of uneven size; let the twin make its steps."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = case.model().double()
    twin = deepcopy(model)
    batches = [[case.sample(rng) for _ in range(rng.integers(2, 12))] for _ in range(3)]
    for batch in batches:  # an effective batch without weight has a test of its own
        while not any(case.sample_loss(twin, sample)[1] for sample in batch):
            batch.append(case.sample(rng))
    build, schedule = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    theirs = build(twin.parameters())
    their_scheduler = schedule and schedule(theirs)
    expected = [
        full_batch_step(twin, batch, case.sample_loss, theirs, their_scheduler, clip)
        for batch in batches
    ]
    ours = build(model.parameters())
    return Both(model, ours, schedule and schedule(ours), batches, expected, clip)


def same_step(report: ga.StepReport, gradients: list[Tensor], model: nn.Module, step: Step) -> None:
    """Assert all that an optimizer step is: each of these hides faults that the others show."""
    assert report.outcome is ga.Outcome.STEPPED
    close(report.loss, step.loss)
    close(report.grad_norm, step.grad_norm)
    assert report.lr == step.lr
    close(gradients, step.gradients)
    close([p.detach() for p in model.parameters()], step.parameters)


combinations = given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**32 - 1),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    scheduler=st.sampled_from(list(SCHEDULERS)),
    clip=st.sampled_from([None, 1e-3, 0.3, 1e3]),
)


@settings(deadline=None, max_examples=80)
@combinations
def test_any_partition_in_any_order(case, seed, optimizer, scheduler, clip):
    pair = both(case, seed, optimizer, scheduler, clip)
    watched = Watched(pair.model, pair.optimizer)
    accumulator = Accumulator(
        model=pair.model,
        update=Update(optimizers=(pair.optimizer,), max_grad_norm=clip),
        loss=case.loss,
        feed=Feed(collate=collate_function(case.pad)),
        sizing=Told(RandomCut(np.random.default_rng(seed))),
        schedulers=() if pair.scheduler is None else (pair.scheduler,),
    )
    for k, (batch, step) in enumerate(zip(pair.batches, pair.expected, strict=True)):
        report = accumulator.step(batch)
        same_step(report, watched.gradients[k], pair.model, step)
        assert report.samples == len(batch)
        assert report.optimizer_step == k + 1
    counters = accumulator.counters
    assert counters.samples == sum(map(len, pair.batches))
    assert (counters.optimizer_steps, counters.skipped) == (3, 0)


@settings(deadline=None, max_examples=40)
@combinations
def test_the_cut_that_the_library_chooses(case, seed, optimizer, scheduler, clip):
    pair = both(case, seed, optimizer, scheduler, clip)
    watched = Watched(pair.model, pair.optimizer)
    capped = case.pad is not None and seed % 2
    accumulator = ga.accumulator(
        pair.model,
        pair.optimizer,
        case.loss,
        scheduler=pair.scheduler,
        max_grad_norm=clip,
        pad=case.pad,
        **({"micro_batch_tokens": 9 + seed % 20} if capped else {"micro_batch_size": 1 + seed % 5}),
    )
    for k, (batch, step) in enumerate(zip(pair.batches, pair.expected, strict=True)):
        report = accumulator.step(batch)
        same_step(report, watched.gradients[k], pair.model, step)
        if case.pad is not None:
            assert report.tokens == sum(len(sample["input_ids"]) for sample in batch)


@settings(deadline=None, max_examples=40)
@combinations
def test_a_loop_of_your_own(case, seed, optimizer, scheduler, clip):
    pair = both(case, seed, optimizer, scheduler, clip)
    watched = Watched(pair.model, pair.optimizer)
    cut, collate = RandomCut(np.random.default_rng(seed)), collate_function(case.pad)
    plans = [cut(len(batch), None) for batch in pair.batches]
    micro_batches = (
        collate([batch[k] for k in positions])
        for batch, plan in zip(pair.batches, plans, strict=True)
        for positions in plan
    )
    accumulator = ga.accumulator(
        pair.model, pair.optimizer, scheduler=pair.scheduler, max_grad_norm=clip
    )
    steps = iter(range(3))
    for micro in accumulator.over(
        micro_batches, steps=lambda done: len(plans[done.optimizer_steps])
    ):
        loss = case.loss(pair.model, micro)
        if (report := accumulator.backward(loss.sum, weight=loss.weight)) is not None:
            k = next(steps)
            same_step(report, watched.gradients[k], pair.model, pair.expected[k])
            assert report.samples == len(pair.batches[k])
            assert report.micro_batches == len(plans[k])
    assert next(steps, None) is None
    assert accumulator.counters.micro_steps == sum(map(len, plans))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_single_precision_to_its_rounding(case):
    """float32: sums of up to 12 samples agree to 1e-5 relative, a few units in the last place."""
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    exact = case.model().double()
    model = deepcopy(exact).float()
    samples = [case.sample(rng) for _ in range(12)]
    single = [
        tuple(leaf.float() for leaf in sample) if isinstance(sample, tuple) else sample
        for sample in samples
    ]
    step = full_batch_step(
        exact, samples, case.sample_loss, SGD(exact.parameters(), lr=1.0), None, None
    )
    before = [p.detach().clone() for p in model.parameters()]
    accumulator = ga.accumulator(
        model,
        SGD(model.parameters(), lr=1.0, fused=True),
        case.loss,
        micro_batch_size=5,
        pad=case.pad,
    )
    report = accumulator.step(single)
    assert report.loss == pytest.approx(step.loss, rel=1e-6)
    assert report.grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
    for old, new, gradient in zip(before, model.parameters(), step.gradients, strict=True):
        torch.testing.assert_close((old - new).double(), gradient, rtol=1e-4, atol=1e-6)
