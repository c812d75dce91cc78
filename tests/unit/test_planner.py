"""Plans: on models whose bytes are known, and on a small GPT."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.gpts import causal, chunked
from helpers.gpts import gpt as small_gpt
from torch import nn

import gradaccum as ga
from gradaccum.batch import default_length
from gradaccum.collate import collate_function
from gradaccum.errors import SampleTooLargeError
from gradaccum.feed import Feed
from gradaccum.integrations.transformers import masks_as_in_earnest
from gradaccum.levers import Levers
from gradaccum.memory import Budget
from gradaccum.partition import Cost
from gradaccum.planner import Subject, least_levers, plan
from gradaccum.prepared import Prepared

CHUNKED = Levers(chunked_loss=True)
BOTH = Levers(chunked_loss=True, checkpointing=True)


@pytest.fixture(scope="module")
def gpt():
    """A GPT whose logits are large: 1,000 tokens for 16 dimensions."""
    torch.manual_seed(0)
    model = small_gpt(vocab_size=1000, n_positions=2048, n_embd=16)
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(4.5, 1.0, 48)), 10, 2000).astype(int)
    ids = [torch.randint(1, 1000, (length,)) for length in lengths]
    samples = [{"input_ids": one, "labels": one} for one in ids]
    return Subject(
        model=model,
        optimizers=[torch.optim.AdamW(model.parameters())],
        loss=causal,
        chunked_loss=chunked,
        feed=Feed(collate=collate_function({"input_ids": 0, "labels": -100})),
        batches=[Prepared.of(half, default_length) for half in (samples[:24], samples[24:])],
        lengths=lengths,
    ), samples[int(lengths.argmax())]


def made(subject, memory, **options):
    with masks_as_in_earnest():
        return plan(subject, Budget.of(memory), **options)


@pytest.fixture(scope="module")
def free(gpt):
    """A plan that nothing bounds."""
    return made(gpt[0], "1GiB")


def test_the_chosen_point_is_the_fastest_that_fits(free):
    found = free
    assert [curve.levers for curve in found.curves] == [Levers(), CHUNKED, BOTH]
    assert found.chosen.levers == Levers()
    assert "no lever is needed" in found.reason
    plain = [point for point in found.points if point.levers == Levers()]
    assert found.chosen.time == min(point.time for point in plain)
    assert min(point.time for point in found.points) == 1.0
    assert not found.seconds
    for curve in found.curves:
        points = [point for point in found.points if point.levers == curve.levers]
        assert [p.peak for p in points] == sorted(p.peak for p in points)
        assert [p.time for p in points] == sorted((p.time for p in points), reverse=True)
        assert all(p.peak <= p.limit * (1 + 1e-6) for p in points)
        assert all(0.3 < p.real_share <= 1 for p in points)


def test_levers_are_pulled_in_the_order_of_their_cost(gpt, free):
    subject, longest = gpt
    alone = {str(curve.levers): curve.peaks(1, subject.longest) for curve in free.curves}
    assert alone["none"] > 1.5 * alone["chunked loss"]
    assert alone["chunked loss"] > 1.2 * alone["chunked loss + checkpointing"]
    for levers in (Levers(), CHUNKED, BOTH):
        budget = Budget(bytes=int(1.05 * alone[str(levers)]))
        with masks_as_in_earnest():
            assert least_levers(subject, budget, longest) == levers
        if levers == BOTH:
            found = made(subject, budget)
            assert found.chosen.peak <= budget.bytes
            assert found.chosen.levers == BOTH
            assert f"A sample of {subject.longest:,} alone needs" in found.reason
    with masks_as_in_earnest():
        for ask in (
            lambda budget: plan(subject, budget),
            lambda budget: least_levers(subject, budget, longest),
        ):
            with pytest.raises(SampleTooLargeError) as caught:
                ask(Budget(bytes=int(0.9 * alone[str(BOTH)])))
            assert "without levers" in caught.value.got
            assert "with chunked loss + checkpointing" in caught.value.got
            assert "raise memory to" in caught.value.remedy


def test_caps_are_those_of_the_budget(free):
    found = replace(free, budget=Budget.of("100MiB"))
    peaks = found.curve(found.chosen.levers).peaks
    for length, count in found.caps([10, 100, 500]).items():
        assert peaks(count, length) <= found.budget.bytes < peaks(count + 1, length)


def test_a_clock_gives_seconds(gpt, free):
    subject, _ = gpt
    asked = []

    def clock(every):
        asked.append(list(every))
        return [2e-9 * (1 + 9 * levers.chunked_loss) for levers in every]

    timed = made(subject, "1GiB", clock=clock)
    assert asked == [[Levers(), CHUNKED, BOTH]]
    assert timed.seconds
    plain = [p.time for p in timed.points if p.levers == Levers()]
    slow = [p.time for p in timed.points if p.levers == CHUNKED]
    before = [p.time for p in free.points if p.levers == CHUNKED]
    assert min(slow) > 5 * min(plain)
    assert np.ptp(np.array(slow) / np.array(before)) < 1e-9 * max(slow)


def test_samples_without_lengths():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    samples = [{"x": torch.randn(3, 16, 16)} for _ in range(20)]
    subject = Subject(
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        loss=lambda model, micro: ga.Loss(model(micro["x"]).square().sum(), len(micro["x"])),
        feed=Feed(),
        batches=[Prepared.of(samples, default_length)],
        lengths=None,
    )
    everything = made(subject, "1GiB", cost=Cost(fixed=1000))
    assert everything.chosen.largest == (20, 1)
    one, all_ = everything.points[0], everything.points[-1]
    budget = Budget(bytes=int(one.peak + 0.3 * (all_.peak - one.peak)))
    some = made(subject, budget, cost=Cost(fixed=1000))
    assert 5 <= some.chosen.largest[0] <= 8
    assert some.caps([1])[1] == some.chosen.largest[0]
    assert some.chosen.micro_batches == -(-20 // some.chosen.largest[0])


def test_sums_of_16_bit_parameters_are_an_axis(gpt):
    """Narrow sums need two bytes a parameter less; they are shown, and never chosen."""
    subject, _ = gpt
    model = small_gpt(vocab_size=1000, n_positions=2048, n_embd=16).bfloat16()
    narrow = replace(subject, model=model, optimizers=[torch.optim.AdamW(model.parameters())])
    found = made(narrow, "1GiB")
    assert [(c.levers, c.sums) for c in found.curves] == [
        (levers, sums) for sums in ("float32", "bfloat16") for levers in subject.levers()
    ]
    parameters = sum(p.numel() for p in model.parameters())
    assert found.needs.gradient_sums == 4 * parameters
    halves = [[p for p in found.points if p.sums == s] for s in ("float32", "bfloat16")]
    for wide, slim in zip(*(half[:1] for half in halves), strict=True):
        assert wide.largest == slim.largest
        # Besides its sum, the new gradient of a parameter is widened before it is added.
        assert wide.peak - slim.peak >= 2 * parameters
    assert found.chosen.sums == "float32"
    (asked,) = {c.sums for c in made(replace(narrow, sum_dtype=torch.bfloat16), "1GiB").curves}
    assert asked == "bfloat16"


def test_sums_are_no_axis_where_parameters_are_wide(free):
    assert {point.sums for point in free.points} == {"float32"}
