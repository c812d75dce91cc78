"""Field cases S: what moves with an update, and clipping once."""

import pytest
import torch
from helpers.training import Recorder, Slope, both_doors, summed, tokens, train, update

import gradaccum as ga


@both_doors
def test_the_scheduler_moves_with_updates(door):
    """S1, accelerate#963, #499, #1382: 8 micro-batches, N = 4, LambdaLR: `last_epoch` 2."""
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batches = [[tokens(1.0)] * 4] * 2
    reports = train(door, model, optimizer, summed, batches, scheduler=scheduler)
    assert scheduler.last_epoch == 2
    assert [report.lr for report in reports] == [1.0, 0.5]  # the ones that the updates used
    assert model.w.item() == pytest.approx(-1.5, rel=1e-12)


@both_doors
@pytest.mark.parametrize("nonfinite", [float("nan"), float("inf")])
def test_the_scheduler_rests_where_nothing_moved(door, nonfinite):
    """S1, accelerate#963, #499, #1382: a skipped step does not move it."""
    model = Slope()
    optimizer = Recorder(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batches = [[tokens(1.0), tokens(nonfinite)], [tokens(1.0)]]
    options = {"scheduler": scheduler, "nonfinite": "skip_step"}
    skipped, stepped = train(door, model, optimizer, summed, batches, **options)
    assert (skipped.outcome, stepped.outcome) == (
        ga.Outcome.SKIPPED_NONFINITE,
        ga.Outcome.STEPPED,
    )
    assert scheduler.last_epoch == 1
    assert [gradient.tolist() for (gradient,) in optimizer.gradients] == [[1.0]]


@both_doors
def test_clipped_once(door):
    """S2, accelerate#641, diffusers#8960: [3, 0] and [0, 4], N = 2, max norm 1: [0.6, 0.8].

    1e-6 relative, since the bound is divided by the norm + 1e-6 as in `clip_grad_norm_`.
    """
    micro_batches = [tokens([3.0, 0.0]), tokens([0.0, 4.0])]
    gradient, report = update(door, micro_batches, max_grad_norm=1.0)
    assert gradient.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert report.grad_norm == pytest.approx(2.5, rel=1e-12)


@both_doors
def test_clipped_once_where_gradients_are_opposite(door):
    """S4, Lightning#9694, #4151: (3, 0) and (-3, 4), N = 2, max norm 1: (0, 1)."""
    micro_batches = [tokens([3.0, 0.0]), tokens([-3.0, 4.0])]
    gradient, report = update(door, micro_batches, max_grad_norm=1.0)
    assert gradient.tolist() == pytest.approx([0.0, 1.0], rel=1e-6)
    assert report.grad_norm == pytest.approx(2.0, rel=1e-12)
