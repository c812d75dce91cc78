"""Bytes counted by hand, against bytes counted by the meter."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradaccum.memory import Budget, LiveBytes, guarded


def test_a_storage_counts_once_and_as_long_as_it_lives():
    with LiveBytes() as meter:
        one = torch.zeros(10)
        assert meter.live == 40
        view = one[2:5].reshape(3, 1)
        assert meter.live == 40
        two = one + 1
        assert meter.live == 80
        del one
        assert meter.live == 80  # the view holds its storage
        del view
        assert meter.live == 40
        two += 1
        assert meter.live == 40
        del two
        assert (meter.live, meter.peak) == (0, 80)
        meter.reset_peak()
        assert meter.peak == 0


def test_what_was_there_before_counts_from_follow_on():
    weight = torch.zeros(6)
    with LiveBytes() as meter:
        meter.follow([weight, weight[:2], torch.zeros(6, dtype=torch.float64)])
        assert meter.live == 24
        assert meter.peak == 72


def test_sparse_tensors_count_their_parts():
    with LiveBytes() as meter:
        dense = torch.eye(3)
        before = meter.live
        sparse = dense.to_sparse()
        assert meter.live == before + 3 * 2 * 8 + 3 * 4
        del sparse
        assert meter.live == before


def by_hand(batch):
    """Return what ``sum(tanh(x W) ** 2)`` holds before, and at most in its backward.

    The worst moment is the gradient of the square, ``gradient * (2 * tanh ** 1)``: tanh, which
    was saved, its power, twice that, and the product; beside the sum and its gradient, 4 bytes
    each.
    """
    inputs, weight, hidden = batch * 32 * 4, 32 * 16 * 4, batch * 16 * 4
    return inputs + weight, inputs + weight + 4 * hidden + 8


@pytest.mark.parametrize("batch", [64, 200])
def test_backward_is_seen(batch):
    weight = nn.Parameter(torch.ones(32, 16))
    x = torch.ones(batch, 32)
    base, worst = by_hand(batch)
    with LiveBytes() as meter:
        meter.follow([weight, x])
        assert meter.live == base
        (x @ weight).tanh().square().sum().backward()
        assert meter.live == base + weight.numel() * 4  # and its gradient
        assert meter.peak == worst
        weight.grad = None
        assert meter.live == base


def test_peaks_are_affine_in_the_batch():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    peaks = []
    for batch in (64, 128, 256):
        x = torch.randn(batch, 16)
        with LiveBytes() as meter:
            meter.follow([*model.parameters(), x])
            model(x).square().sum().backward()
        model.zero_grad()
        peaks.append(meter.peak)
    assert peaks[2] - peaks[1] == 2 * (peaks[1] - peaks[0])


def test_a_checkpoint_needs_less():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 99), nn.Tanh(), nn.Linear(99, 32)) for _ in range(8))
    )
    x = torch.randn(512, 32)

    def peak(run):
        with LiveBytes() as meter:
            meter.follow([*model.parameters(), x])
            run().sum().backward()
        model.zero_grad()
        return meter.peak

    def checkpointed():
        out = x
        for block in model:
            out = checkpoint(block, out, use_reentrant=False)
        return out

    assert peak(checkpointed) < 0.6 * peak(lambda: model(x))


def test_numbers_are_those_without_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    found = []
    for meter in (None, LiveBytes(), guarded(Budget.of("1GiB"))):
        torch.manual_seed(1)
        if meter is None:
            model(x).square().sum().backward()
        else:
            with meter:
                model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def attempt(model, x, budget):
    """Return whether a step fits, its peak, and what is alive after its gradients are freed."""
    meter = guarded(Budget.of(budget))
    fits = True
    with meter:
        meter.follow([*model.parameters(), x])
        try:
            model(x).square().sum().backward()
        except torch.OutOfMemoryError:
            fits = False
        model.zero_grad()
    return fits, meter.peak, meter.live


def test_a_budget_is_enforced_at_every_operation_and_nothing_is_left():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh())
    x = torch.randn(64, 32)
    _, need, base = attempt(model, x, 2**30)
    places = set()
    for budget in range(base, need, 512):
        fits, reached, left = attempt(model, x, budget)
        assert not fits
        assert left == base  # forward or backward: nothing of it is alive
        places.add(reached)
    assert len(places) >= 5  # it was raised in this many different places
    assert attempt(model, x, need) == (True, need, base)
