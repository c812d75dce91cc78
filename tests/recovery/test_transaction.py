"""A failure at every operation of a step: afterwards nothing tells that it happened."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.failures import FailAt
from torch import nn

import gradaccum as ga
from gradaccum.collate import collate_function
from gradaccum.errors import SampleTooLargeError
from gradaccum.feed import Feed
from gradaccum.memory import Budget, LiveBytes, guarded
from gradaccum.partition import Cap, CappedCut, FixedCut
from gradaccum.recovery import is_out_of_memory
from gradaccum.sizing import Told
from gradaccum.update import Update

pytestmark = pytest.mark.usefixtures("little_to_collect")

LENGTHS = [9, 2, 7, 7, 4, 2, 9, 5, 3, 8]


class Model(nn.Module):
    """Embeds, normalises by BatchNorm's statistics, drops out, and counts its calls."""

    def __init__(self, dropout: float = 0.4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.norm = nn.BatchNorm1d(6, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(6, 11, dtype=dtype)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        self.calls += 1
        hidden = self.embed(ids)
        hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return self.out(self.dropout(hidden).tanh())


def loss(model, micro):
    labels = micro["input_ids"]
    noise = random.random() + np.random.rand()  # the user's own use of the generators
    found = ga.losses.causal_cross_entropy(model(labels), micro["labels"])
    return ga.Loss(found.sum * (1 + 0.01 * noise), found.weight)


def samples():
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 11, (length,), generator=draw) for length in LENGTHS]
    return [{"input_ids": one, "labels": one} for one in ids]


BATCH = samples()


@dataclass
class Run:
    """Everything that a step may change."""

    model: Model
    optimizer: torch.optim.Optimizer
    scheduler: Any
    accumulator: ga.Accumulator

    def tensors(self):
        held = [value for one in self.optimizer.state.values() for value in one.values()]
        return [*self.model.parameters(), *self.model.buffers(), *held]

    def state(self):
        return [t.detach().clone() for t in self.tensors()], (
            random.getstate(),
            str(np.random.get_state()),
            torch.get_rng_state().tolist(),
            self.optimizer.param_groups[0]["lr"],
            self.scheduler.last_epoch,
            self.accumulator.counters,
            [p.grad for p in self.model.parameters()],
            [module.training for module in self.model.modules()],
        )


def make(cut, *, loss=loss, dropout=0.4, dtype=torch.float32, optimizer=torch.optim.AdamW) -> Run:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model = Model(dropout, dtype)
    optimizer = optimizer(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    accumulator = ga.Accumulator(
        model=model,
        update=Update(optimizers=(optimizer,), max_grad_norm=0.5),
        loss=loss,
        feed=Feed(collate=collate_function({"input_ids": 0, "labels": -100})),
        sizing=Told(cut),
        schedulers=(scheduler,),
    )
    return Run(model, optimizer, scheduler, accumulator)


def same(one, other):
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b)


def same_report(one, other, *, replays):
    told, expected = one.as_dict(), other.as_dict()
    assert told.pop("replays") == replays
    assert expected.pop("replays") == 0
    del told["seconds"], expected["seconds"]
    assert told == expected


@dataclass(frozen=True)
class Watched:
    """A cut that looks at something when it is asked, which is before each attempt."""

    cut: Any
    look: Any

    def __call__(self, *args, **options):
        self.look()
        return self.cut(*args, **options)

    def below(self, count, length):
        return Watched(self.cut.below(count, length), self.look)

    def relaxed(self):
        return self


def operations(cut, **options):
    """Return the first operation of a step's micro-batches, the first of its update, and all."""
    starts = []
    run = make(Watched(cut, lambda: starts.append(mode.operations)), **options)
    if options:
        run.model.norm.eval()
    with FailAt() as mode:
        run.accumulator.step(BATCH)
    norm = max(k for k, name in enumerate(mode.names) if "foreach_norm" in name)
    assert any("backward" in name for name in mode.names[:norm])
    return starts[-1], norm, mode.operations


CUTS = {"size": FixedCut(size=4), "tokens": CappedCut(cap=Cap(limit=20))}
cuts = pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)


@cuts
def test_memory_runs_out_at_every_operation(cut):
    """Bit for bit as a run begun with the micro-batches that it ended with."""
    start, update, _ = operations(cut)
    assert update - start > 200
    expected = {}
    for number in range(start, update):
        run = make(cut)
        with FailAt(number) as mode:
            report = run.accumulator.step(BATCH)
        assert mode.operations > number
        ended = run.accumulator.cut
        if ended not in expected:
            other = make(ended)
            expected[ended] = other.accumulator.step(BATCH), other.state()
        same_report(report, expected[ended][0], replays=1)
        same(run.state(), expected[ended][1])
    assert len(expected) > 1  # another micro-batch failed, so another cap was learnt


@cuts
def test_the_update_is_that_of_the_partition_without_failure(cut):
    """Where samples do not interact: to rounding, however it was cut in the end."""
    apart = {"loss": quiet, "dropout": 0.0, "dtype": torch.float64, "optimizer": torch.optim.SGD}
    start, update, _ = operations(cut, **apart)

    def step(number):
        run = make(cut, **apart)
        run.model.norm.eval()
        with FailAt(number):
            report = run.accumulator.step(BATCH)
        return run, report

    clean, expected = step(None)
    for number in range(start, update, 7):
        run, report = step(number)
        assert report.micro_batches > expected.micro_batches
        assert report.loss == pytest.approx(expected.loss, rel=1e-12)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
        assert (report.lr, report.weight, report.samples, report.tokens) == (
            expected.lr,
            expected.weight,
            expected.samples,
            expected.tokens,
        )
        for a, b in zip(run.model.parameters(), clean.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def quiet(model, micro):
    return ga.losses.causal_cross_entropy(model(micro["input_ids"]), micro["labels"])


@cuts
@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt(), MemoryError()])
def test_another_error_at_every_operation_leaves_the_state_as_it_was(cut, error):
    _, update, _ = operations(cut)
    clean = make(cut)
    expected = clean.accumulator.step(BATCH)
    run = make(cut)
    before = run.state()
    for number in range(0, update, 5):
        with pytest.raises(type(error)) as caught, FailAt(number, error):
            run.accumulator.step(BATCH)
        assert caught.value is error
        same(run.state(), before)
        assert run.accumulator.phase.name == "IDLE"
    assert run.accumulator.report is None
    same_report(run.accumulator.step(BATCH), expected, replays=0)  # and the next is clean
    same(run.state(), clean.state())


def test_no_failure_of_the_update_is_swallowed():
    """It may have moved some parameters already; running it again would move them twice."""
    _, update, end = operations(FixedCut(size=4))
    assert end > update
    for number in range(update, end):
        run = make(FixedCut(size=4))
        with pytest.raises(torch.OutOfMemoryError), FailAt(number):
            run.accumulator.step(BATCH)
        assert run.accumulator.counters.optimizer_steps == 0


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 0.99])
def test_nothing_of_the_failed_attempt_is_alive_before_the_next(share):
    def step(limit):
        alive, meter = [], LiveBytes()
        run = make(Watched(FixedCut(size=10), lambda: alive.append(meter.live)))
        run.accumulator.step(BATCH)  # optimizer state and warm caches are there from here on
        alive.clear()
        meter = LiveBytes(limit)
        meter.follow(run.tensors())
        with meter:
            report = run.accumulator.step(BATCH)
        return alive, report, meter.peak

    _, _, peak = step(None)
    armed = [share * peak]

    def limit(live):
        if armed and live > armed[0]:
            armed.clear()
            raise torch.OutOfMemoryError

    alive, report, _ = step(limit)
    assert report.replays == 1
    assert len(alive) == 2
    assert alive[0] == alive[1]


def test_what_grows_back_and_how_patiently():
    run = make(FixedCut(size=8))
    with FailAt(20):
        run.accumulator.step(BATCH)
    sizes = []
    for _ in range(32 * 5):
        run.accumulator.step(BATCH)
        sizes.append(int(run.accumulator.cut(8, np.full(8, 9)).micro_batches[0].size))
    assert sorted(set(sizes)) == [4, 5, 6, 7, 8]
    assert sizes == sorted(sizes)
    assert sizes[30] == 4
    assert sizes[31] == 5
    with FailAt(20):
        run.accumulator.step(BATCH)
    sizes = []
    for _ in range(70):
        run.accumulator.step(BATCH)
        sizes.append(int(run.accumulator.cut(8, np.full(8, 9)).micro_batches[0].size))
    assert sizes[62] == sizes[0]
    assert sizes[63] > sizes[0]


def test_evaluation_never_changes_the_caps_of_training():
    run = make(FixedCut(size=8))
    run.accumulator.step(BATCH)
    cut = run.accumulator.cut
    before = [p.clone() for p in run.model.parameters()], run.accumulator.counters
    expected = run.accumulator.evaluate(BATCH)
    for number in range(12, 60, 3):
        with FailAt(number):
            found = run.accumulator.evaluate(BATCH)
        assert found.loss == pytest.approx(expected.loss, rel=1e-1)
        assert found.samples == expected.samples
        assert run.accumulator.cut is cut
        assert run.accumulator.counters == before[1]
        assert all(map(torch.equal, run.model.parameters(), before[0]))
        assert run.model.training


def test_a_sample_that_never_fits_is_named():
    def full(model, micro):
        if micro["input_ids"].shape[1] > 8:
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB.\nmore")
        return loss(model, micro)

    run = make(FixedCut(size=4), loss=full)
    before = run.state()
    with pytest.raises(SampleTooLargeError) as caught:
        run.accumulator.step(BATCH)
    assert caught.value.call == "sample 0 of the effective batch (length 9)"
    assert caught.value.got == "Tried to allocate 9 GiB."
    assert "checkpointing" in caught.value.remedy
    same(run.state(), before)


@pytest.mark.parametrize("share", [0.95, 0.6, 0.4, 0.3])
def test_a_guard_is_obeyed_with_the_same_update(share):
    """The budget is enforced at every operation: the first cut is too large for it."""

    def step(budget):
        run = make(FixedCut(size=10), loss=quiet, dropout=0.0, optimizer=torch.optim.SGD)
        run.model.norm.eval()
        meter = LiveBytes() if budget is None else guarded(Budget(bytes=int(budget)))
        meter.follow([*run.model.parameters(), *run.model.buffers()])
        with meter:
            return run, run.accumulator.step(BATCH), meter.peak

    clean, expected, peak = step(None)
    run, report, _ = step(share * peak)
    assert expected.micro_batches == 1
    assert report.micro_batches > 1
    assert report.replays >= 1
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    for a, b in zip(run.model.parameters(), clean.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_other_allocators_say_it_in_other_words():
    for message in (
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "MPS backend out of memory (MPS allocated: 9 GB)",
    ):
        assert is_out_of_memory(RuntimeError(message))
        run = make(FixedCut(size=4))
        with FailAt(30, RuntimeError(message)):
            assert run.accumulator.step(BATCH).replays == 1
    for error in (RuntimeError("out of memory?"), ValueError("x"), KeyboardInterrupt()):
        assert not is_out_of_memory(error)
