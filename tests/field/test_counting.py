"""Field cases C: how many micro-batches make a step, and what is counted when."""

from types import SimpleNamespace

import pytest
import torch
from helpers.meters import Looks
from helpers.training import Recorder, Slope, both_doors, exactly, flat, summed, tokens, update
from torch import nn

import gradaccum as ga


def counted(size=1, **options):
    """Return an accumulator on a model of one slope, and the optimizer that notes gradients."""
    model = Slope()
    optimizer = Recorder(model.parameters())
    accumulator = ga.accumulator(
        model, optimizer, summed, micro_batch_size=size, verify="never", **options
    )
    return SimpleNamespace(model=model, optimizer=optimizer, accumulator=accumulator)


def run_over(run, loader, steps):
    """Train over a loader of micro-batches; return the reports of its steps."""
    reports = []
    for rows in run.accumulator.over(loader, steps=steps):
        if (report := run.accumulator.backward(summed(run.model, rows))) is not None:
            reports.append(report)
    return reports


def stepped(run):
    """Return the gradients that each optimizer step had."""
    return [gradient.tolist() for (gradient,) in run.optimizer.gradients]


class Collated(torch.utils.data.Dataset):
    """Samples that are rows of one coefficient."""

    def __init__(self, *coefficients):
        self.rows = tokens(*coefficients)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return (self.rows[index],)


def first(model, micro):
    return summed(model, micro[0])


def of_samples(size, **options):
    """Return an accumulator like `counted`, for samples of `Collated`."""
    run = counted(size)
    run.accumulator = ga.accumulator(
        run.model, run.optimizer, first, micro_batch_size=size, verify="never", **options
    )
    return run


@pytest.mark.parametrize(("num", "steps", "expected"), [(5, 2, 3), (2, 4, 1)])
def test_the_last_partial_batch_has_the_same_gradient(num, steps, expected):
    """C1, transformers PR#39659, Lightning#19987: M = 5, N = 2 and M = 2, N = 4: ratio 1.0."""
    run = counted()
    run_over(run, [tokens(3.0, 3.0)] * num, steps)
    assert stepped(run) == [exactly([3.0])] * expected


def test_the_last_partial_batch_of_a_dataset_has_the_same_gradient():
    """C1, transformers PR#39659, Lightning#19987: ten samples in fours, micro-batches of two."""
    run = of_samples(2)
    for batch in ga.effective_batches(Collated(*[3.0] * 10), 4):
        run.accumulator.step(batch)
    assert stepped(run) == [exactly([3.0])] * 3


def test_the_tail_is_kept():
    """C2, transformers#14309: M = 5, N = 2 makes 3 steps, and all five micro-batches are used."""
    run = counted()
    reports = run_over(run, [tokens(float(k)) for k in range(5)], 2)
    assert stepped(run) == [exactly([0.5]), exactly([2.5]), exactly([4.0])]
    assert [report.micro_batches for report in reports] == [2, 2, 1]


@pytest.mark.parametrize(("last", "expected"), [("keep", [0.5, 2.5, 4.0]), ("drop", [0.5, 2.5])])
def test_the_tail_is_kept_or_dropped_as_told(last, expected):
    """C2, transformers#14309: dropped, it makes 2 steps and leaves nothing in the sums."""
    run = of_samples(1)
    for batch in ga.effective_batches(Collated(*map(float, range(5))), 2, last=last, shuffle=False):
        run.accumulator.step(batch)
    assert stepped(run) == [exactly([value]) for value in expected]
    assert run.model.w.grad is None


def test_steps_are_rounded_up_over_a_loader():
    """C3, transformers#33455, #36297: 9 samples in twos, N = 2, 3 epochs: 9 steps, 15 micro."""
    run = counted()
    loader = torch.utils.data.DataLoader(tokens(*map(float, range(9))), batch_size=2)
    for _ in range(3):
        run_over(run, loader, 2)
    counters = run.accumulator.counters
    assert (counters.optimizer_steps, counters.micro_steps, counters.samples) == (9, 15, 27)


def test_steps_are_rounded_up_over_a_dataset():
    """C3, transformers#33455, #36297: the length says what the iteration then does."""
    run = of_samples(2)
    batches = ga.effective_batches(Collated(*map(float, range(9))), 4, epochs=3)
    assert len(batches) == 9
    for batch in batches:
        run.accumulator.step(batch)
    counters = run.accumulator.counters
    assert (counters.optimizer_steps, counters.micro_steps, counters.samples) == (9, 15, 27)


def test_more_steps_than_micro_batches():
    """C4, transformers#2995: M = 3, N = 8 is one step, never silent zero."""
    run = counted()
    (report,) = run_over(run, [tokens(1.0), tokens(2.0), tokens(6.0)], 8)
    assert stepped(run) == [exactly([3.0])]
    assert report.micro_batches == 3


@pytest.mark.parametrize("last", ["keep", "drop"])
def test_a_larger_effective_batch_than_there_are_samples(last):
    """C4, transformers#2995: the only effective batch of an epoch is run, dropped tail or not."""
    run = of_samples(1)
    batches = ga.effective_batches(Collated(1.0, 2.0, 6.0), 8, last=last)
    assert len(batches) == 1
    for batch in batches:
        run.accumulator.step(batch)
    assert stepped(run) == [exactly([3.0])]
    sampler = ga.EffectiveBatchSampler([1, 1, 1], size=8, micro_batch_size=1, last=last)
    assert len(sampler) == len(list(sampler)) == 3


class Dropped(nn.Module):
    """A model with a mode: dropout, behind a slope."""

    def __init__(self):
        super().__init__()
        self.slope = Slope(4, start=1.0)
        self.dropout = nn.Dropout(0.5)
        self.dropout.eval()  # a module that the user froze stays so

    def forward(self, rows):
        return self.dropout(self.slope(rows))


@pytest.mark.parametrize("by_hand", [False, True])
def test_evaluation_between_micro_batches(by_hand):
    """C5, accelerate#3017, #1050, #960: sums unchanged, step after N, train mode restored."""
    model = Dropped()
    optimizer = Recorder(model.parameters())
    accumulator = ga.accumulator(model, optimizer, summed, micro_batch_size=2)
    validation, micro_batches = torch.ones(6, 4, dtype=torch.float64), torch.eye(4).double()
    reports = []
    for k, rows in enumerate(accumulator.over(micro_batches.split(1), steps=4)):
        reports.append(accumulator.backward(summed(model, rows)))
        if k == 0:
            held = model.slope.w.grad.clone()
            if by_hand:
                model.eval()
                with torch.no_grad():
                    assert model(validation).mean() == 4.0
                model.train()
                model.dropout.eval()
            else:
                found = accumulator.evaluate(validation)
                assert (found.loss, found.samples) == (4.0, 6)
            assert torch.equal(model.slope.w.grad, held)
            assert [module.training for module in model.modules()] == [True, True, False]
    assert [report is None for report in reports] == [True, True, True, False]
    assert flat(optimizer.gradients[0]).tolist() == exactly([0.25] * 4)
    assert accumulator.counters.samples == 4


def test_a_generator_without_a_length():
    """C6, transformers#12499, #20089: 7 micro-batches, N = 2: 4 steps, the last of one."""
    run = counted()
    reports = run_over(run, (tokens(1.0) for _ in range(7)), 2)
    assert [report.micro_batches for report in reports] == [2, 2, 2, 1]


def test_a_generator_of_samples():
    """C6, transformers#12499, #20089: the same of samples, and it ends."""
    run = of_samples(1)
    batches = ga.effective_batches(((tokens(1.0)[0],) for _ in range(7)), 2)
    reports = [run.accumulator.step(batch) for batch in batches]
    assert [report.samples for report in reports] == [2, 2, 2, 1]


def test_begins_and_ends_are_nested():
    """C7, transformers#33671: M = 5, N = 2, two epochs: as many begins as ends as steps."""
    run = counted()
    events = []

    def begin(counters):
        events.append("begin")
        return 2

    for _ in range(2):
        for rows in run.accumulator.over([tokens(1.0)] * 5, steps=begin):
            events.append("micro")
            assert run.accumulator.phase.name == "SUMMING"
            if run.accumulator.backward(summed(run.model, rows)) is not None:
                events.append("end")
                assert run.accumulator.phase.name == "IDLE"
    full, partial = ["begin", "micro", "micro", "end"], ["begin", "micro", "end"]
    assert events == (full + full + partial) * 2
    assert len(run.optimizer.gradients) == events.count("end") == 6


def test_every_second_step():
    """C8, transformers#935, diffusers PR#308: 8 micro-batches, N = 2, "every 2 steps": twice."""
    run = counted()
    reports = run_over(run, [tokens(1.0)] * 8, 2)
    assert [report.optimizer_step for report in reports if report.optimizer_step % 2 == 0] == [2, 4]
    assert len(ga.effective_batches(Collated(*[1.0] * 8), 2)) == 4  # what a progress bar counts


def test_nothing_is_left_over_from_an_epoch():
    """C10, torchtune PR#2745: M = 63, N = 8: the first step of epoch 2 has 1.0, not 1.875."""
    run = counted()
    run_over(run, [tokens(1.0)] * 63, 8)
    assert len(stepped(run)) == 8
    run_over(run, [tokens(1.0)] * 63, 8)
    assert stepped(run)[8] == exactly([1.0])


@both_doors
def test_two_optimizers_count_one_update(door):
    """C11, Lightning#17958: 10 micro-batches, N = 5, two optimizers: 2 updates, not 4."""
    models = nn.ModuleList([Slope(), Slope()])
    optimizers = [Recorder(model.parameters()) for model in models]
    empty = tokens(1.0)[:0]

    def loss(models, rows):
        return ga.Loss(models[0](rows).sum() + models[1](rows).sum(), len(rows))

    accumulator = ga.accumulator(
        models,
        optimizers,
        loss,
        micro_batch_size=1,
        collate=lambda samples: samples[0]["rows"],
        length=lambda sample: len(sample["rows"]),
        verify="never",
    )
    batches = [[tokens(1.0, 1.0)] * 5, [empty] * 5, [tokens(1.0, 1.0)] * 5]
    for batch in batches:
        if door == "step":
            accumulator.step([{"rows": rows} for rows in batch])
        else:
            for rows in accumulator.over(batch, steps=5):
                accumulator.backward(loss(models, rows))
    expected = {"micro_steps": 15, "optimizer_steps": 2, "skipped": 1}
    expected |= {"step": {"samples": 15, "tokens": 20}, "over": {"samples": 20, "tokens": 0}}[door]
    assert accumulator.counters.as_dict() == expected
    assert [len(optimizer.gradients) for optimizer in optimizers] == [2, 2]


@both_doors
def test_the_optimizer_is_untouched_between_steps(door):
    """C12, keras#19990: w = 1, lr 0.1, decay 0.1, no gradient, N = 3: 0.99, not 0.970299."""
    model = Slope(start=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    run_one(door, model, optimizer, [tokens(0.0)] * 3)
    assert model.w.item() == exactly(0.99)


@both_doors
@pytest.mark.parametrize("gradient", [1.0, -100.0])
def test_the_first_step_of_adam_is_the_learning_rate(door, gradient):
    """C12, keras#19990: bias correction counts one step after N = 3 micro-batches."""
    model = Slope()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-12)
    run_one(door, model, optimizer, [tokens(gradient)] * 3)
    assert model.w.item() == exactly(-0.1 if gradient > 0 else 0.1)
    assert optimizer.state[model.w]["step"] == 1


def run_one(door, model, optimizer, micro_batches):
    """Run one effective batch through a door."""
    accumulator = ga.accumulator(
        model,
        optimizer,
        first,
        micro_batch_size=1,
        collate=lambda samples: samples[0],
        verify="never",
    )
    if door == "step":
        return accumulator.step([(rows,) for rows in micro_batches])
    for rows in accumulator.over(micro_batches, steps=len(micro_batches)):
        report = accumulator.backward(summed(model, rows))
    return report


def test_steps_that_move_hold_from_the_start_of_an_effective_batch():
    """C13, yolov5 PR#3722: N ramps from 1 to 8 over 1,000 micro-batches."""
    run = counted()
    asked = []

    def ramp(counters):
        asked.append(round(1 + 7 * min(counters.micro_steps / 1_000, 1)))
        return asked[-1]

    reports = run_over(run, [tokens(1.0)] * 1_000, ramp)
    taken = [report.micro_batches for report in reports]
    assert taken[:-1] == asked[:-1]  # the loader may end within the last
    assert sum(taken) == 1_000
    assert asked == sorted(asked)
    assert {1, 8} == {asked[0], asked[-1]}
    assert stepped(run) == [exactly([1.0])] * len(reports)


def test_sizes_that_move_hold_from_the_start_of_an_effective_batch():
    """C13, yolov5 PR#3722: the size ramps from 1 to 8 over 1,000 samples, epochs of 300."""
    run = of_samples(3)

    def ramp(progress):
        return round(1 + 7 * min(progress.samples / 1_000, 1))

    batches = ga.effective_batches(Collated(*[1.0] * 300), ramp, epochs=4)
    total, sizes, taken = len(batches), [], []
    for batch in batches:
        begun = run.accumulator.counters.samples
        sizes.append(min(round(1 + 7 * min(begun / 1_000, 1)), 300 - begun % 300))
        taken.append(run.accumulator.step(batch).samples)
    assert taken == sizes
    assert sum(taken) == 1_200
    assert {1, 8} == {taken[0], max(taken)}
    assert stepped(run) == [exactly([1.0])] * total


def test_any_two_of_three():
    """C14, nanoGPT#283, DeepSpeed#3228: global 40, micro 1, world 4 is N = 10."""
    found = ga.partition.accumulation_steps(effective_batch=40, micro_batch_size=1, world_size=4)
    assert found == 10


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"effective_batch": 40, "micro_batch_size": 1, "steps": 40}, "160"),
        ({"effective_batch": 40, "micro_batch_size": 3, "steps": None}, "not 40"),
    ],
)
def test_three_that_disagree(numbers, told):
    """C14, nanoGPT#283, DeepSpeed#3228: an error naming all values and the world size."""
    with pytest.raises(ValueError, match=told) as caught:
        ga.partition.accumulation_steps(**numbers, world_size=4)
    for name, value in numbers.items():
        assert value is None or f"{name}={value}" in str(caught.value)
    assert "world_size=4" in str(caught.value)


@both_doors
def test_the_same_batch_thrice(door):
    """C15, DeepSpeed PR#6550, PR#7839: lr = 0, the same data: bit-equal gradients."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = Recorder(model.parameters(), lr=0.0)
    x = torch.randn(10, 5, generator=generator)

    def loss(model, x):
        return ga.Loss.of(model(x).square())

    accumulator = ga.accumulator(model, optimizer, loss, micro_batch_size=3, max_grad_norm=0.1)
    for _ in range(3):
        if door == "step":
            accumulator.step(x)
        else:
            for rows in accumulator.over(x.split(3), steps=4):
                accumulator.backward(loss(model, rows))
    one, *others = map(flat, optimizer.gradients)
    assert len(others) == 2
    assert all(torch.equal(one, other) for other in others)


@both_doors
def test_one_record_an_update(door):
    """C16, Lightning#1173, torchtitan PR#4167: (2, 1 token) and (90, 9 tokens) make 9.2."""
    handed = []

    def loss(model, rows):
        handed.append(summed(model, rows))
        return handed[-1]

    micro_batches = [tokens(2.0), tokens(*[10.0] * 9)]
    _, report = update(door, micro_batches, model=Slope(start=1.0), loss=loss)
    assert report.loss == exactly(9.2)
    assert [(one.sum.item(), one.weight) for one in handed] == [(2.0, 1), (90.0, 9)]
    assert all(one.sum.requires_grad for one in handed)  # the user's own, as it was


@both_doors
def test_nothing_is_looked_at_within_an_effective_batch(door):
    """C16, Lightning#1173, torchtitan PR#4167: one wait for the device, at the end."""
    looks = Looks()
    seen = []

    def loss(model, rows):
        seen.append(len(looks.seen))
        return summed(model, rows)

    with looks:
        update(door, [tokens(2.0)] * 4, loss=loss, max_grad_norm=1.0)
    assert seen == [0, 0, 0, 0]
    assert looks.seen == ["tolist"]
