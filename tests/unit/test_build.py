from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradaccum as ga
from gradaccum.errors import ArgumentError


def squares(model, x):
    return ga.Loss.of(model(x).square())


def build(*args, loss=squares, **options):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ga.accumulator(model, optimizer, loss, *args, **options)


def encoded(length=3):
    return {"input_ids": [1] * length}


@pytest.mark.parametrize(
    ("options", "call", "expected", "got", "remedy"),
    [
        ({"verify": "no"}, "verify='no'", "'first' or 'never'", "'no'", "verify='first'"),
        ({"nonfinite": "x"}, "nonfinite='x'", "'skip_step'", "'x'", "nonfinite='raise'"),
        ({"collate": list, "pad": {}}, "collate=..., pad=", "one of", "both", "leave pad out"),
        (
            {"micro_batch_size": 2, "micro_batch_tokens": 9},
            "micro_batch_size=2, micro_batch_tokens=9",
            "one of micro_batch_size and micro_batch_tokens",
            "both",
            "memory alone",
        ),
        (
            {"memory": "1GiB", "micro_batch_size": 2, "micro_batch_tokens": 9},
            "memory='1GiB', micro_batch_size=2, micro_batch_tokens=9",
            "one of memory and micro_batch_size and micro_batch_tokens",
            "all three",
            "memory alone",
        ),
        ({"memory": 0}, "memory=0", "positive number of bytes", "0", '"4GiB"'),
        ({"memory": -5}, "memory=-5", "positive number of bytes", "-5", '"4GiB"'),
        ({"memory": "12 bananas"}, "memory='12 bananas'", "positive", "bananas", '"4GiB"'),
        ({"memory": "900TiB"}, "memory='900TiB'", "at most", "900.00 TiB", "leave memory out"),
        (
            {"loss": None, "collate": list},
            "collate=...",
            "a loss function",
            "none",
            "leave collate out",
        ),
        ({"loss": None, "pad": {"x": 0}}, "pad=...", "a loss function", "none", "leave pad out"),
        (
            {"loss": None, "length": len},
            "length=...",
            "a loss function",
            "none",
            "leave length out",
        ),
        (
            {"loss": None, "device": "cpu"},
            "device=...",
            "a loss function",
            "none",
            "leave device out",
        ),
        (
            {"loss": None, "memory": "1GiB"},
            "memory=...",
            "a loss function",
            "none",
            "leave memory out",
        ),
        (
            {"loss": None, "micro_batch_size": 2},
            "micro_batch_size=.",
            "a loss function",
            "none",
            "Pass loss",
        ),
        ({"max_grad_norm": "1"}, "max_grad_norm='1'", "a positive norm", "'1'", "=None"),
        (
            {"device": "cudaa", "micro_batch_size": 1},
            "device='cudaa'",
            "a device of this machine",
            "cudaa",
            '"cpu"',
        ),
        ({"micro_batch_size": 0}, "micro_batch_size=0", "at least 1", "0", "micro_batch_size=1"),
        ({"micro_batch_size": 2.0}, "micro_batch_size=2.0", "whole", "2.0", "micro_batch_size=1"),
        ({"micro_batch_tokens": -1}, "tokens=-1", "whole", "-1", "micro_batch_tokens=1"),
        (
            {"cost": ga.partition.Cost(), "micro_batch_size": 2},
            "cost=",
            "memory or micro_batch_tokens",
            "leaves nothing to choose",
            "Leave micro_batch_size out",
        ),
        ({"max_grad_norm": 0}, "max_grad_norm=0", "positive", "0", "max_grad_norm=None"),
        ({"pad": 3, "micro_batch_size": 2}, "pad=int", "mapping", "3", "-100"),
        (
            {"pad": SimpleNamespace(pad_token_id=None), "micro_batch_size": 2},
            "pad=tokenizer",
            "padding token",
            "None",
            "eos_token",
        ),
    ],
)
def test_arguments_that_make_no_sense(options, call, expected, got, remedy):
    with pytest.raises(ArgumentError) as caught:
        build(**options)
    error = caught.value
    assert call in error.call
    assert expected in error.expected
    assert got in error.got
    assert remedy in error.remedy


@pytest.mark.parametrize("optimizer", [[], (), ["adam"], [None]])
def test_what_is_no_optimizer(optimizer):
    with pytest.raises(ArgumentError, match="expected one torch Optimizer") as caught:
        ga.accumulator(nn.Linear(2, 1), optimizer)
    assert "fused=True" in caught.value.remedy


def test_an_optimizer_of_another_model():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    parameters = [model.weight, other.bias]
    with pytest.raises(ArgumentError, match=r"SGD.param_groups\[0\]\['params'\]\[1\]") as caught:
        ga.accumulator(model, torch.optim.SGD(parameters, lr=0.1))
    assert (caught.value.expected, caught.value.got) == (
        "a parameter of the model (Linear)",
        "another tensor of shape (1,)",
    )
    assert "ModuleList" in caught.value.remedy


def test_a_parameter_in_two_optimizers():
    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ArgumentError, match="an earlier optimizer holds"):
        ga.accumulator(model, optimizers)


@pytest.mark.parametrize("several", [False, True])
def test_schedulers_one_or_several(several):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    given = [scheduler, scheduler] if several else scheduler
    accumulator = ga.accumulator(model, optimizer, scheduler=given)
    for x in accumulator.over([torch.ones(1, 2)], steps=1):
        accumulator.backward(squares(model, x))
    assert scheduler.last_epoch == (2 if several else 1)


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_door_that_lacks_the_loss(method):
    model = nn.Linear(2, 1)
    accumulator = ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ArgumentError, match="got none") as caught:
        getattr(accumulator, method)(torch.ones(2, 2))
    assert f"accumulator.{method}(batch)" in caught.value.call


def embedded(**options):
    model = nn.Embedding(9, 9)

    def loss(model, micro):
        return ga.losses.causal_cross_entropy(model(micro["input_ids"]), micro["input_ids"])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ga.accumulator(model, optimizer, loss, **({"verify": "never"} | options))


def test_tokens_bound_a_micro_batch_after_padding():
    accumulator = embedded(micro_batch_tokens=12, pad={"input_ids": 0})
    report = accumulator.step([encoded(n) for n in (6, 2, 6, 2, 2)])
    assert (report.micro_batches, report.tokens, report.padded_tokens) == (2, 18, 18)
    with pytest.raises(ArgumentError, match="without a length"):
        accumulator.step({"input_ids": torch.ones(3, 4, dtype=int)})


def test_cost_decides_under_the_cap():
    steps = [
        embedded(
            micro_batch_tokens=100, pad={"input_ids": 0}, cost=ga.partition.Cost(fixed=fixed)
        ).step([encoded(n) for n in (9, 2)])
        for fixed in (0, 100)
    ]
    assert [report.micro_batches for report in steps] == [2, 1]


@pytest.mark.parametrize("known", [False, True])
def test_too_large_a_sample_is_named_before_training(known):
    accumulator = embedded(micro_batch_tokens=5, pad={"input_ids": 0})
    samples = [encoded(n) for n in (2, 3, 2, 9)]
    if known:  # at once, though it comes in the second effective batch
        batches = ga.effective_batches(samples, 2, lengths=[2, 3, 2, 9], shuffle=False)
        with pytest.raises(ga.GradaccumError, match=r"sample 3 \(length 9\)"):
            accumulator.step(next(iter(batches)))
    else:
        with pytest.raises(ga.GradaccumError, match=r"sample 1 \(length 9\)"):
            accumulator.step(samples[2:])
    assert accumulator.counters.micro_steps == 0


def test_lengths_that_are_not_what_is_collated():
    accumulator = embedded(micro_batch_tokens=50, length=lambda sample: 2, pad={"input_ids": 0})
    with pytest.raises(ArgumentError, match=r"expected 2 tokens, .* got 3 tokens"):
        accumulator.step([encoded(3)] * 2)


def test_length_of_ones_own():
    model = nn.Linear(1, 1)
    seen = []

    def loss(model, micro):
        seen.append(tuple(micro["x"].shape))
        return squares(model, micro["x"][..., None])

    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        micro_batch_tokens=6,
        length=lambda sample: len(sample["x"]),
        pad={"x": 0.0},
        verify="never",
    )
    accumulator.step([{"x": torch.ones(n)} for n in (1, 6, 2, 2)])
    assert seen == [(1, 6), (3, 2)]


def test_device_of_the_model_or_ones_own():
    model = nn.Linear(2, 1, device="meta")
    seen = []

    class Stop(Exception):
        pass

    def loss(model, x):
        seen.append(x.device.type)
        raise Stop

    for options in ({}, {"device": "cpu"}):
        accumulator = ga.accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss,
            micro_batch_size=1,
            verify="never",
            **options,
        )
        with pytest.raises(Stop):
            accumulator.step(torch.ones(2, 2))
    assert seen == ["meta", "cpu"]


def test_a_scheduler_of_another_optimizer():
    model = nn.Linear(2, 1)
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(other, 0.9)
    with pytest.raises(ArgumentError, match="built on another optimizer"):
        ga.accumulator(model, one, scheduler=scheduler)


@pytest.mark.parametrize("scheduler", [3, [None], ["cosine"]])
def test_what_is_no_scheduler(scheduler):
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match="one torch LRScheduler"):
        ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), scheduler=scheduler)


def test_what_is_no_model():
    with pytest.raises(ArgumentError, match=r"expected a torch\.nn\.Module"):
        ga.accumulator(None, torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))


def test_an_optimizer_that_wants_a_closure():
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match="evaluates the loss anew"):
        ga.accumulator(model, torch.optim.LBFGS(model.parameters()))


def test_no_budget_is_what_is_free_and_what_is_held(monkeypatch):
    """Asked once, when nothing has run: what the optimizer holds later was free then."""
    monkeypatch.setattr("gradaccum.build.usable_bytes", lambda device, held: 2**20 + held)
    model = nn.Linear(20, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    limits = []
    for _ in range(2):
        accumulator = ga.accumulator(
            model,
            optimizer,
            lambda model, micro: squares(model, micro[0]),
            length=lambda sample: len(sample[0]),
            verify="never",
        )
        for _ in range(2):
            accumulator.step([(torch.ones(20),)])
            limits.append(accumulator.cut.cap.limit)
    weights = 4 * (20 * 30 + 30)
    assert limits == [2**20 + weights] * 2 + [2**20 + 2 * weights] * 2


def test_a_device_has_one_name():
    """Bytes on "cpu:0" are bytes on the CPU."""
    for device in ("cpu", "cpu:0", torch.device("cpu"), None):
        found = build(device=device)._whole._feed.device
        assert torch.empty(0, device=found).device == torch.ones(1).device
