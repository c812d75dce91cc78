"""Field cases M: memory that runs out, and memory that does not grow."""

import gc
import random
import weakref
from itertools import chain
from time import sleep

import pytest
import torch
from helpers.training import Recorder, Slope, both_doors, summed, tokens
from torch import nn

import gradaccum as ga
from gradaccum.errors import SampleTooLargeError
from gradaccum.memory import LiveBytes

pytestmark = pytest.mark.usefixtures("little_to_collect")

WIDTH = 5


def rows(count):
    """Return samples, each of which names itself in its first number."""
    found = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
    found[:, 0] = torch.arange(count)
    return [(row,) for row in found.double()]


BATCH = rows(16)


def deep(*, norm=False):
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1)]
    if norm:
        layers[1:1] = [nn.BatchNorm1d(7), nn.Dropout(0.3)]
    return nn.Sequential(*layers).double()


class Seen:
    """A loss that notes the samples of each call, and then looks at what it is told to look at."""

    def __init__(self, look=None) -> None:
        self.look = look
        self.calls: list[list[int]] = []

    def __call__(self, model, micro):
        (x,) = micro
        self.calls.append([int(name) for name in x[:, 0]])
        if self.look is not None:
            self.look(self, x)
        return ga.Loss.of(model(x).square())

    @property
    def sizes(self):
        return [len(names) for names in self.calls]


def build(model, loss, size):
    optimizer = Recorder(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    accumulator = ga.accumulator(
        model, optimizer, loss, scheduler=scheduler, micro_batch_size=size, verify="never"
    )
    return optimizer, accumulator


def one_step(model, loss, size):
    """Return the gradients of a step over 16 samples, and its report."""
    optimizer, accumulator = build(model, loss, size)
    report = accumulator.step(BATCH)
    return optimizer.gradients[0], report


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_smaller_micro_batch_is_the_same_training():
    """M1, transformers#21521, PR#33281: 16 with room for 4 is 4 x 4, not an effective batch of 4.

    Gradients, learning rates and steps are those of a run that was told 4 to begin with.
    """
    runs = []
    for size, replays in ((4, [0, 0, 0, 0, 0]), (16, [2, 0, 0, 0, 0])):
        model, loss = deep(), Seen(most(4))
        optimizer, accumulator = build(model, loss, size)
        reports = [accumulator.step(BATCH) for _ in range(5)]
        assert [report.replays for report in reports] == replays
        assert [report.micro_batches for report in reports] == [4] * 5
        assert [report.lr for report in reports] == pytest.approx([0.1 / (1 + k) for k in range(5)])
        counters = accumulator.counters
        assert (counters.optimizer_steps, counters.micro_steps, counters.samples) == (5, 20, 80)
        assert loss.sizes == [*[16, 8][: sum(replays)], *[4] * 20]
        for k in range(-20, 0, 4):  # each sample once
            assert sorted(chain(*loss.calls[k : k + 4 or None])) == list(range(16))
        runs.append((optimizer.gradients, list(model.parameters())))
    (told, parameters), (learnt, others) = runs
    assert all(map(equal, told, learnt))
    assert equal(parameters, others)


@pytest.mark.parametrize("layer", [0, 2])
def test_no_parameter_is_counted_twice(layer):
    """M2: memory runs out in the middle of backward, when later layers have their gradients."""
    found = []
    for size in (4, 8):
        model, there = deep(), []

        def full(gradient, there=there, model=model):
            if not there and len(gradient) > 4:
                there.append([p.grad is not None for p in model.parameters()])
                raise torch.OutOfMemoryError("no room")

        on_gradient(model[layer], full)
        gradients, report = one_step(model, Seen(), size)
        assert report.replays == len(there) == (size == 8)
        found.append(gradients)
    assert there == [[False] * (layer + 2) + [True] * (4 - layer)]
    assert equal(*found)


def on_gradient(module, hook):
    """Call a hook with the gradient of each output of a module."""
    module.register_forward_hook(lambda *found: found[2].register_hook(hook) and None)


def most(number, error=None):
    """Return a look that raises where there are more samples."""

    def look(_, x):
        if len(x) > number:
            sleep(0.01)
            raise error or torch.OutOfMemoryError("no room\nat all")

    return look


def test_sizes_are_halved_down_to_one():
    """M8, composer PR#1081, #3400: 16 samples and room for one: 16, 8, 4, 2, 1."""
    loss = Seen(most(1))
    optimizer, accumulator = build(deep(), loss, 16)
    report = accumulator.step(BATCH)
    assert loss.sizes == [16, 8, 4, 2, *[1] * 16]
    assert (report.replays, report.micro_batches, report.samples) == (4, 16, 16)
    assert accumulator.report is report
    assert report.seconds > 4 * 0.01  # those that failed are in it
    assert equal(optimizer.gradients[0], one_step(deep(), Seen(), 1)[0])


@pytest.mark.parametrize("sample", [0, 15])
def test_where_not_even_one_sample_fits_the_error_goes_up(sample):
    """M8, composer PR#1081, #3400: in one sentence, with nothing left behind."""

    def look(loss, x):
        if sample in loss.calls[-1]:
            raise torch.OutOfMemoryError("no room\nat all")

    model, loss = deep(), Seen(look)
    optimizer, accumulator = build(model, loss, 16)
    with pytest.raises(SampleTooLargeError) as caught:
        accumulator.step(BATCH)
    assert str(caught.value).startswith(
        f"sample {sample} of the effective batch: expected room for one sample on the device, "
        "got no room. "
    )
    assert "\n" not in str(caught.value)
    tried = [1, 1, 1, 1, 1] if sample == 0 else [1, 2, 4, 8, 16]
    assert loss.sizes == list(chain(*([16 // 2**k] * n for k, n in enumerate(tried))))
    assert optimizer.gradients == []
    assert equal(list(model.parameters()), list(deep().parameters()))
    assert all(p.grad is None for p in model.parameters())
    assert accumulator.phase.name == "IDLE"
    loss.look = None
    assert accumulator.step(BATCH).micro_batches == 1  # nothing was learnt from it


@pytest.mark.parametrize("error", [RuntimeError("device-side assert"), ValueError("a bug")])
def test_another_error_is_not_taken_for_a_lack_of_memory(error):
    """M8, composer PR#1081, #3400: it goes up as it is, after one try."""
    loss = Seen(most(0, error))
    with pytest.raises(type(error)) as caught:
        one_step(deep(), loss, 16)
    assert caught.value is error
    assert loss.sizes == [16]


def fails_third(loss, x):
    """A look: memory runs out in the third micro-batch of four, once."""
    if len(loss.calls) == 3 and len(x) == 4:
        raise torch.OutOfMemoryError("no room")


def test_everything_is_as_if_the_failed_try_had_not_been():
    """M9, composer PR#485, #1207, #1998: gradients, running statistics, random numbers."""
    found = []
    for size, look in ((4, fails_third), (2, None)):
        model = deep(norm=True)
        random.seed(5)
        gradients, report = one_step(model, Seen(look), size)
        assert report.replays == (size == 4)
        assert int(model[1].num_batches_tracked) == 8
        found.append((gradients, list(model.buffers()), torch.get_rng_state(), random.random()))
    assert equal(found[0][0], found[1][0])
    assert equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])
    assert found[0][3] == found[1][3]


def test_sums_of_another_accumulator_survive():
    """M9, composer PR#485, #1207, #1998: it is in the middle of an effective batch of its own."""
    other = Slope()
    optimizer = Recorder(other.parameters())
    outer = ga.accumulator(other, optimizer)
    for k, micro in enumerate(outer.over([tokens(1.0), tokens(2.0, 3.0), tokens(6.0)], steps=3)):
        outer.backward(summed(other, micro))
        if k == 1:
            sums = other.w.grad.clone()
            _, report = one_step(deep(), Seen(fails_third), 4)
            assert report.replays == 1
            assert torch.equal(other.w.grad, sums)
    assert optimizer.gradients[0][0].tolist() == [3.0]


@pytest.mark.parametrize("where", ["forward", "backward", "cycle"])
def test_nothing_of_a_failed_try_is_left_at_the_next(where):
    """M10, pytorch#18853, Lightning#8028: inputs, outputs and losses are gone when it begins."""
    model = deep()
    alive: list[weakref.ref] = []
    left, full = [], []

    def note(tensor):
        alive.append(weakref.ref(tensor.untyped_storage()))

    def fail(size):
        if not full and size > 4:
            full.append(size)
            raise torch.OutOfMemoryError("no room")

    def loss(model, micro):
        left.append(sum(ref() is not None for ref in alive))
        out = model(*micro)
        found = ga.Loss.of(out.square())
        for tensor in (*micro, out, found.sum):
            note(tensor)
        if where == "cycle":
            cycle = [found]
            cycle.append(cycle)  # as a loss has that keeps a function of its own
        if where != "backward":
            fail(len(out))
        return found

    if where == "backward":
        on_gradient(model[0], lambda gradient: fail(len(gradient)))
    model[2].register_forward_hook(lambda *found: note(found[2]))
    gc.disable()
    try:
        _, report = one_step(model, loss, 8)
    finally:
        gc.enable()
    assert (full, report.replays) == ([8], 1)
    assert len(alive) == 5 * 4
    assert left[:2] == [0, 0]
    if where != "cycle":
        assert max(left) < 4  # but for the sums, which are added up at the end


@both_doors
def test_memory_does_not_grow_with_accumulation_steps(door):
    """At 1,024 accumulation steps as much is alive at once as at 1, to a hundredth."""
    model = nn.Sequential(nn.Linear(2, 512), nn.Tanh(), nn.Linear(512, 1))

    def loss(model, micro):
        return ga.Loss.of(model(micro[0]).square())

    peaks = []
    for steps in (1, 1_024):
        batch = (torch.ones(steps * 256, 2),)
        accumulator = ga.accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-6),
            loss,
            micro_batch_size=256,
            verify="never",
        )
        meter = LiveBytes()
        meter.follow([*model.parameters(), *batch])
        before = meter.live
        with meter:
            if door == "step":
                report = accumulator.step(batch)
            else:
                for micro in accumulator.over(zip(batch[0].split(256), strict=True), steps=steps):
                    report = accumulator.backward(loss(model, micro))
        assert report.micro_batches == steps
        peaks.append(meter.peak - before)
    assert peaks[0] > 1_000_000
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_an_evaluation_that_runs_out_of_memory_changes_nothing():
    """What did not fit in an evaluation says nothing of training, nor the other way round."""
    model, loss = deep(norm=True), Seen()
    _, accumulator = build(model, loss, 16)
    accumulator.step(BATCH)
    cut, counters = accumulator.cut, accumulator.counters
    expected = accumulator.evaluate(BATCH)
    before = [t.clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    loss.calls.clear()
    loss.look = most(4)
    found = accumulator.evaluate(BATCH)
    loss.look = None
    after = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    assert loss.sizes == [16, 8, *[4] * 4]
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.samples == 16
    assert accumulator.cut is cut
    assert accumulator.counters == counters
    assert equal(before, after)
    assert all(module.training for module in model.modules())
    assert accumulator.step(BATCH).micro_batches == 1
