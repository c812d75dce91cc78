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
