"""Field cases P: bits that must not move."""

import pytest
import torch
from helpers.training import both_doors, train
from torch import nn

import gradaccum as ga

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}
optimizers = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def inputs(count):
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(count))


def squares(model, x):
    return ga.Loss.of(model(x).square())


def state(optimizer):
    return [value for held in optimizer.state.values() for value in held.values()]


def bits(model, optimizer):
    return [value.detach().clone() for value in (*model.parameters(), *state(optimizer))]


@both_doors
@optimizers
@pytest.mark.parametrize("rows", [1, 4])
def test_one_micro_batch_is_the_bare_optimizer(door, build, rows):
    """P3, optax#828: N = 1 is bit for bit what the optimizer does by itself, over five steps.

    For a weight that is a power of two: dividing sums is then exact, as dividing losses is.
    """
    batches = [[inputs(rows) + k] for k in range(5)]
    model, bare = network(), network()
    optimizer, alone = build(model.parameters()), build(bare.parameters())
    train(door, model, optimizer, squares, batches)
    for (x,) in batches:
        alone.zero_grad()
        squares(bare, x).mean().backward()
        alone.step()
    assert all(map(torch.equal, model.parameters(), bare.parameters()))
    assert all(map(torch.equal, state(optimizer), state(alone)))


@optimizers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_moves_between_optimizer_steps(build, dtype):
    """P3, optax#828: parameters and optimizer state are bit-identical, dtype too."""
    model = network().to(dtype)
    optimizer = build(model.parameters())
    accumulator = ga.accumulator(model, optimizer)
    for k, x in enumerate(accumulator.over(inputs(24).to(dtype).split(2), steps=4)):
        if k % 4 == 0:
            before = bits(model, optimizer)
        report = accumulator.backward(squares(model, x))
        assert (report is None) == (k % 4 < 3)
        if report is None:
            now = bits(model, optimizer)
            assert [value.dtype for value in now] == [value.dtype for value in before]
            assert all(map(torch.equal, now, before))
    assert accumulator.counters.optimizer_steps == 3
    assert {p.dtype for p in model.parameters()} == {dtype}


def flows(rows):
    """Return gradients that a bfloat16 parameter is given one by one."""
    return rows.bfloat16()


class Half(nn.Module):
    """``w . c`` of bfloat16: the gradient of a token is its row of coefficients."""

    def __init__(self, size=1, start=1.0, dtype=torch.bfloat16):
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), start, dtype=dtype))
        self.late = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, rows):
        return (rows * self.w).sum()


def linear(model, rows):
    return ga.Loss(model(rows), 1.0)


def stepped_with(optimizer):
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append(
            [p.grad for group in optimizer.param_groups for p in group["params"]]
        )
    )
    return found


@both_doors
def test_no_addition_is_lost(door):
    """P1, accelerate#3877, DeepSpeed#1800: 1.0 + 1,000 x 1e-3 in bfloat16: 2.000, not 1.0."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = stepped_with(optimizer)
    rows = [flows(torch.tensor([value])) for value in (1.0, *[1e-3] * 1_000)]
    exact = sum(row.double().item() for row in rows)
    (report,) = train(door, model, optimizer, linear, [rows])
    assert report.grad_norm * report.weight == pytest.approx(exact, rel=1e-6)
    gradient, late = seen[0]
    assert (gradient.dtype, late) == (torch.bfloat16, None)
    assert gradient.item() == torch.tensor(exact / 1001).bfloat16().item()
    assert model.w.grad is None
    assert model.w.grad_dtype == torch.bfloat16


def test_sums_as_narrow_as_asked_for():
    """What P1 is about, by choice: plain sums of bfloat16 stay at 1.0."""
    model = Half()
    rows = [flows(torch.tensor([value])) for value in (1.0, *[1e-3] * 1_000)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"sum_dtype": torch.bfloat16}
    (report,) = train("over", model, optimizer, linear, [rows], **options)
    assert report.grad_norm * report.weight == pytest.approx(1.0, rel=1e-6)


@both_doors
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_1024_micro_batches_against_double_precision(door, dtype):
    """Below 1e-6 of the float64 sum of the same gradients; plain sums are off by 1e-2 and more."""
    rng = torch.Generator().manual_seed(2)
    rows = [(torch.randn(64, generator=rng) + 0.1).to(dtype) for _ in range(1024)]
    model = Half(64, dtype=dtype)
    accumulator = ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for k, row in enumerate(accumulator.over(rows, steps=1024), start=1):
        if k == 1024:
            before = model.w.grad.double()
        accumulator.backward(model(row), weight=1.0)
    exact = torch.stack(rows[:-1]).double().sum(0)
    assert before.dtype == torch.float64
    assert (before - exact).norm() / exact.norm() < 1e-6
    plain = torch.zeros(64, dtype=dtype)
    for row in rows[:-1]:
        plain += row
    assert (plain.double() - exact).norm() / exact.norm() > 1e-3


@both_doors
def test_a_parameter_that_is_first_used_last(door):
    """P2, pytorch#196996: the dtype of its gradient is the others'."""
    model = Half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    seen = stepped_with(optimizer)

    def loss(model, rows):
        return ga.Loss(model(rows) + (model.late.sum() if rows.item() == 3.0 else 0.0), 1.0)

    rows = [flows(torch.tensor([value])) for value in (1.0, 2.0, 3.0)]
    train(door, model, optimizer, loss, [rows, rows])
    for gradients in seen:
        assert [g.dtype for g in gradients] == [torch.bfloat16] * 2
        assert [g.item() for g in gradients] == pytest.approx([2.0, 1 / 3], rel=1e-2)


@both_doors
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_sums_are_rounded_once_and_after_scaling(door, fused, clip):
    model = Half(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    seen = stepped_with(optimizer)
    rows = [flows(torch.tensor(row)) for row in ([1.0, 2.0, 3.0], [0.3, 0.1, -7.0], [2e-3, 5.0, 1])]
    train(door, model, optimizer, linear, [rows], max_grad_norm=clip)
    mean = torch.stack(rows).double().sum(0) / 3
    if clip is not None:
        mean *= clip / (mean.norm() + 1e-6)
    assert torch.equal(seen[0][0], mean.float().bfloat16())
    assert model.w.dtype == torch.bfloat16


def test_wider_sums_than_float32():
    model = nn.Linear(2, 1)
    accumulator = ga.accumulator(
        model, torch.optim.SGD(model.parameters(), lr=1.0), sum_dtype=torch.float64
    )
    for x in accumulator.over([torch.ones(1, 2)] * 3, steps=3):
        if model.weight.grad is not None:
            assert model.weight.grad.dtype == torch.float64
        accumulator.backward(model(x).sum(), weight=1)
    assert model.weight.grad_dtype == torch.float32


def test_a_failure_puts_the_dtypes_of_gradients_back():
    model = Half()
    accumulator = ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in accumulator.over([flows(torch.ones(1))] * 3, steps=3):
        with pytest.raises(ga.GradaccumError):
            accumulator.backward(torch.ones(()), weight=1.0)
        break
    assert model.w.grad_dtype == torch.bfloat16
    model.w.grad = torch.ones(1, dtype=torch.bfloat16)
