"""Recomputed blocks: the same step in less memory."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import gradaccum as ga
from gradaccum.errors import ArgumentError
from gradaccum.levers import checkpoint_blocks, repeated_blocks
from gradaccum.memory import LiveBytes


class Block(nn.Module):
    def __init__(self, size: int, norm: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.norm = nn.BatchNorm1d(size) if norm else nn.LayerNorm(size)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, scale=1.0):
        return x + scale * self.dropout(self.inner(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, norm=False, depth=4, size=16) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.blocks = nn.ModuleList(Block(size, norm) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def step(model, x):
    torch.manual_seed(3)
    with LiveBytes() as meter:
        meter.follow([*model.parameters(), x])
        out = model(x).square().sum()
        out.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return gradients, [b.clone() for b in model.buffers()], meter.peak, torch.rand(1)


@pytest.mark.parametrize("norm", [False, True])
def test_the_same_step_in_less_memory(norm):
    model, x = Stack(norm), torch.randn(64, 16)
    other = deepcopy(model)
    assert checkpoint_blocks(other) == 4
    plain, recomputed = step(model, x), step(other, x)
    for a, b in zip(plain[0], recomputed[0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(plain[1], recomputed[1], strict=True):
        assert torch.equal(a, b)  # running statistics moved once
    assert torch.equal(plain[3], recomputed[3])
    assert recomputed[2] < 0.6 * plain[2]


def test_the_model_stays_what_it_was():
    model = Stack()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    checkpoint_blocks(model)
    assert checkpoint_blocks(model) == 4
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    copy = deepcopy(model)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
        assert copy(torch.ones(2, 16)).abs().sum() == 0  # the copy runs its own blocks
        assert model.eval()(torch.ones(2, 16)).abs().sum() > 0


def test_the_blocks_are_those_with_most_parameters():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)),
        *Stack(depth=3).blocks,
        nn.ReLU(),
        nn.ReLU(),
    )
    assert [type(block) for block in repeated_blocks(model)] == [Block] * 3
    stages = nn.ModuleList([nn.Sequential(*Stack(depth=2).blocks) for _ in range(2)])
    assert len(repeated_blocks(stages)) in {2, 4}


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))]
)
def test_a_model_without_blocks(model):
    """A lone layer keeps nothing that running it again would save."""
    with pytest.raises(ArgumentError, match="at least two modules of one class"):
        checkpoint_blocks(model)


def test_through_an_accumulator():
    x = torch.randn(9, 16)
    found = []
    for lever in (False, True):
        torch.manual_seed(0)
        model = Stack(norm=False)
        if lever:
            checkpoint_blocks(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = ga.accumulator(
            model,
            optimizer,
            lambda model, rows: ga.Loss(model(rows).square().sum(), len(rows)),
            micro_batch_size=4,
            verify="never",
        )
        accumulator.step(x)
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))
