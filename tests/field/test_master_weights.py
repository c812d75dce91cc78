"""Parameters of 16 bits that are updated in float32: what a step changes is not lost."""

import copy
from functools import partial

import pytest
import torch
from helpers.training import both_doors, train
from torch import nn

import gradaccum as ga
from gradaccum.dtypes import Masters
from gradaccum.errors import ArgumentError
from gradaccum.master_weights import rounded_at_random

WAYS = {"kept": {"master_weights": True}, "random": {"stochastic_rounding": True}}
both_ways = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=3e-4),
    "AdamW fused": partial(torch.optim.AdamW, lr=3e-4, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=3e-4, foreach=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-3),
    "Adadelta": partial(torch.optim.Adadelta, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4),
}
optimizers = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
SIZES = (3, 1, 5)


def network(dtype=torch.bfloat16):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def batches(count, dtype=torch.bfloat16):
    rng = torch.Generator().manual_seed(7)
    return [[torch.randn(n, 6, generator=rng).to(dtype) for n in SIZES] for _ in range(count)]


def squares(model, x):
    return ga.Loss(model(x).float().square().sum(), len(x))


class Twin:
    """The same by hand: float32 weights, which each forward rounds."""

    def __init__(self, build, dtype=torch.bfloat16, max_grad_norm=None):
        self.model = network(dtype)
        self.weights = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer, self.bound = build(self.weights), max_grad_norm

    def step(self, micro_batches):
        sums = [torch.zeros_like(w, dtype=torch.float64) for w in self.weights]
        for x in micro_batches:
            loss = self.model(x).float().square().sum()
            found = torch.autograd.grad(loss, list(self.model.parameters()))
            sums = [total + one.double() for total, one in zip(sums, found, strict=True)]
        for weight, total in zip(self.weights, sums, strict=True):
            weight.grad = (total / sum(map(len, micro_batches))).float()
        if self.bound is not None:
            torch.nn.utils.clip_grad_norm_(self.weights, self.bound)
        self.optimizer.step()
        with torch.no_grad():
            for p, weight in zip(self.model.parameters(), self.weights, strict=True):
                p.copy_(weight)


def copies(optimizer):
    """Return the copies as they are saved."""
    saved = optimizer.state_dict()
    return [saved["state"][k]["master_weight"] for g in saved["param_groups"] for k in g["params"]]


@both_doors
@optimizers
@pytest.mark.parametrize("bound", [None, 0.5])
def test_the_updates_of_float32_weights(door, build, bound):
    model, twin = network(), Twin(build, max_grad_norm=bound)
    optimizer = build(model.parameters())
    data = batches(5)
    for batch in data:
        twin.step(batch)
    train(door, model, optimizer, squares, data, master_weights=True, max_grad_norm=bound)
    moved = [
        (a - b.float()).norm() for a, b in zip(twin.weights, network().parameters(), strict=True)
    ]
    for ours, theirs, far in zip(copies(optimizer), twin.weights, moved, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 1e-4 * far  # in between, sums of float32 take another order
    for ours, theirs in zip(model.parameters(), twin.model.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6)


@both_doors
def test_float16_as_well(door):
    build = OPTIMIZERS["AdamW fused"]
    model, twin = network(torch.float16), Twin(build, torch.float16)
    optimizer = build(model.parameters())
    data = batches(4, torch.float16)
    for batch in data:
        twin.step(batch)
    train(door, model, optimizer, squares, data, master_weights=True)
    for ours, theirs in zip(copies(optimizer), twin.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class One(nn.Module):
    """Parameters at 1.0 whose gradient is 1."""

    def __init__(self, size=4096):
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))

    def forward(self, x):
        return (x * self.w).sum()


def weighed(model, x):
    return ga.Loss(model(x), 1.0)


def test_small_updates_add_up():
    """1.0 less 300 times 1e-3: bfloat16 stays at 1.0, since its next number below is 0.996."""
    ends = {}
    for name, options in ({"plain": {}} | WAYS).items():
        model = One()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.ones(1, dtype=torch.bfloat16)
        train("over", model, optimizer, weighed, [[x, x]] * 300, **options)
        ends[name] = model.w.detach().double()
    assert ends["plain"].eq(1.0).all()
    assert ends["kept"].eq(torch.tensor(0.7).bfloat16().double()).all()
    assert ends["random"].mean().item() == pytest.approx(0.7, abs=1e-3)
    assert ends["random"].std() > 1e-3


def halfway(options, build, stopped, load=True):
    """Return the weights after six effective batches, saved and built anew after `stopped`."""
    model = network()
    optimizer = build(model.parameters())
    accumulator = ga.accumulator(model, optimizer, **options)
    for k, batch in enumerate(batches(6)):
        if k == stopped:
            saved = copy.deepcopy([one.state_dict() for one in (model, optimizer, accumulator)])
            model = network()
            optimizer = build(model.parameters())
            accumulator = ga.accumulator(model, optimizer, **options)
            order = (model, optimizer, accumulator)
            for one, state in zip(order, saved, strict=True):
                one.load_state_dict(state)
        for x in accumulator.over(batch, steps=len(batch)):
            accumulator.backward(squares(model, x))
    return [
        *model.state_dict().values(),
        *(c for s in optimizer.state.values() for c in s.values()),
    ]


@both_ways
@pytest.mark.parametrize("name", ["SGD", "AdamW fused", "Adagrad"])
@pytest.mark.parametrize("stopped", [1, 3])
def test_saved_and_resumed_bit_for_bit(options, name, stopped):
    """By model, optimizer and accumulator as ever; torch alone would round the state."""
    whole = halfway(options, OPTIMIZERS[name], None)
    parts = halfway(options, OPTIMIZERS[name], stopped)
    assert [t.dtype for t in whole] == [t.dtype for t in parts]
    assert all(map(torch.equal, whole, parts))


def steps(accumulator, model, data):
    for batch in data:
        for x in accumulator.over(batch, steps=len(batch)):
            accumulator.backward(squares(model, x))


@pytest.mark.parametrize("how", ["load_state_dict", "data", "in place"])
def test_weights_that_are_changed_from_outside_count(how):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    accumulator = ga.accumulator(model, optimizer, master_weights=True)
    steps(accumulator, model, batches(2))
    other = {name: value + 1.0 for name, value in network().state_dict().items()}
    untouched = model[2].weight.detach().clone()
    if how == "load_state_dict":
        model.load_state_dict(other)
    elif how == "data":
        for name, p in model.named_parameters():
            p.data.copy_(other[name])
    else:
        with torch.no_grad():
            model[0].weight[2:4] = other["0.weight"][2:4]
    before = copies(optimizer)
    rounded = [p.detach().float() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(accumulator, model, batches(1))
    after = copies(optimizer)
    if how == "in place":
        assert torch.equal(after[0][2:4], rounded[0][2:4])
        assert torch.equal(after[0][4:], before[0][4:])  # and not rounded
        assert torch.equal(after[2], before[2])
        assert torch.equal(model[2].weight, untouched)
    else:
        assert all(map(torch.equal, after, rounded))


@both_ways
@pytest.mark.parametrize("fails", [False, True])
def test_groups_hold_the_models_own_parameters(options, fails):
    model = network()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulator = ga.accumulator(model, optimizer, **options)
    steps(accumulator, model, batches(1))
    seen = []

    def look(*_):
        seen.extend(optimizer.param_groups[0]["params"])
        if fails:
            raise OSError("a hook of the user's")

    optimizer.register_step_pre_hook(look)
    before = [p.detach().clone() for p in model.parameters()]
    if fails:
        with pytest.raises(OSError, match="a hook"):
            steps(accumulator, model, batches(1))
        assert all(map(torch.equal, model.parameters(), before))
    else:
        steps(accumulator, model, batches(1))
        assert not torch.equal(model[0].weight, before[0])
    assert [p.dtype for p in seen] == [torch.float32] * 3 + [torch.bfloat16]
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert [p.grad for p in model.parameters()] == [None] * 4
    assert {id(p) for p in optimizer.state} == {id(p) for p in list(model.parameters())[:3]}
    state = [t.dtype for s in optimizer.state.values() for t in s.values()]
    assert state == [torch.float32] * 9


@both_ways
def test_wider_parameters_step_by_themselves(options):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2).bfloat16())
    alone = copy.deepcopy(model)
    x = torch.randn(5, 6)

    def loss(model, x):
        return ga.Loss(model[1](model[0](x).bfloat16()).float().square().sum(), len(x))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train("over", model, optimizer, loss, [[x]], **options)
    loss(alone, x).sum.backward()
    expected = alone[0].weight.detach() - 0.1 * alone[0].weight.grad / 5
    torch.testing.assert_close(model[0].weight, expected)
    assert "master_weight" not in optimizer.state_dict()["state"].get(0, {})


def test_a_parameter_that_comes_later_has_a_copy():
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    accumulator = ga.accumulator(model, optimizer, master_weights=True)
    steps(accumulator, model, batches(1))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})
    steps(accumulator, model, batches(1))
    assert len(copies(optimizer)) == 4


def test_a_skipped_step_leaves_copies_alone():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    options = {"master_weights": True, "nonfinite": "skip_step"}
    accumulator = ga.accumulator(model, optimizer, **options)
    steps(accumulator, model, batches(1))
    before = copies(optimizer)
    for x in accumulator.over(batches(1)[0], steps=3):
        report = accumulator.backward(squares(model, x).sum * float("nan"), weight=len(x))
    assert report.outcome is ga.Outcome.SKIPPED_NONFINITE
    assert all(map(torch.equal, copies(optimizer), before))


def test_with_a_loss_scale():
    build = OPTIMIZERS["AdamW fused"]
    model, twin = network(torch.float16), Twin(build, torch.float16)
    optimizer = build(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    data = batches(3, torch.float16)
    for batch in data:
        twin.step(batch)
    train("step", model, optimizer, squares, data, master_weights=True, scaler=scaler)
    for ours, theirs in zip(copies(optimizer), twin.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_rounding_at_random():
    rng = torch.Generator().manual_seed(1)
    values = torch.tensor([1.0 + 2**-9, -3.0 - 2**-8, 1e-40, 0.3, -7.77]).repeat(40_000, 1)
    found = rounded_at_random(values, rng)
    assert found.dtype == torch.bfloat16
    ulp = 2.0 ** (values[0].abs().log2().floor().clamp(min=-126) - 7)
    assert ((found.float() - values).abs() < ulp).all()  # one of the two neighbours
    assert ((found.double() - values.double()).mean(0).abs() < 0.01 * ulp).all()
    assert found[:, 0].unique().tolist() == [1.0, 1.0 + 2**-7]
    exact = torch.tensor([0.0, -0.0, 2.0, float("inf"), float("-inf"), 3.3895e38]).bfloat16()
    assert torch.equal(rounded_at_random(exact.float(), rng), exact)
    assert rounded_at_random(torch.tensor([float("nan")]), rng).isnan().all()


def test_rounding_is_a_function_of_the_step():
    ends = []
    for seed in (1, 2):
        model = One()
        torch.manual_seed(seed)
        options = {"stochastic_rounding": True}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.ones(1, dtype=torch.bfloat16)
        train("over", model, optimizer, weighed, [[x], [x]], **options)
        ends.append(model.w.detach().clone())
        drawn = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(drawn, torch.rand(1))  # nothing was drawn from the user's generator
    assert torch.equal(*ends)
    first = One()
    train("over", first, torch.optim.SGD(first.parameters(), lr=1e-3), weighed, [[x]], **options)
    changed = (ends[0] != 1.0).sum(), (first.w != 1.0).sum()
    assert changed[0] > 1.5 * changed[1]  # other parameters in the second step


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master_weights": True, "stochastic_rounding": True}, "one of the two"),
        ({"master_weights": "yes"}, "True or False"),
        ({"stochastic_rounding": 1}, "True or False"),
        ({"master_weights": True, "sum_dtype": torch.bfloat16}, "as wide as the copies"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    model = network()
    with pytest.raises(ArgumentError, match=words):
        ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_no_random_rounding_of_float16():
    model = network(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="one of float16"):
        ga.accumulator(model, optimizer, stochastic_rounding=True)


def test_a_state_that_torch_has_rounded_is_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train("over", model, optimizer, squares, batches(1), master_weights=True)
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(ArgumentError, match="once the accumulator is built"):
        ga.accumulator(model, again, master_weights=True)


def test_what_is_asked_for_by_at_most_one():
    assert Masters.of(True, False) is Masters.KEPT
    assert Masters.of(False, True) is Masters.PASSING
    assert Masters.of(False, False) is Masters.NONE


def test_a_saved_state_is_neither_changed_nor_needed():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    accumulator = ga.accumulator(model, optimizer, master_weights=True)
    steps(accumulator, model, batches(1))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    steps(accumulator, model, batches(1))
    for k, of_it in kept["state"].items():
        # Torch itself goes on counting in the "step" that it has loaded.
        assert all(
            torch.equal(value, saved["state"][k][key])
            for key, value in of_it.items()
            if key != "step"
        )
        del of_it["master_weight"]
    optimizer.load_state_dict(kept)  # as without copies: they begin anew
    assert "master_weight" not in optimizer.state_dict()["state"][0]
    steps(accumulator, model, batches(1))
    assert len(copies(optimizer)) == 4


def test_no_sum_outlives_its_step():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    accumulator = ga.accumulator(model, optimizer, master_weights=True)
    steps(accumulator, model, batches(1))
    assert [one.grad for one in copies(optimizer)] == [None] * 4
