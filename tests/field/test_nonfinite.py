"""Field case M11, NeMo#11272, Lightning#5243: losses and gradients that are not finite."""

import pytest
import torch
from helpers.training import Recorder, Slope, both_doors, summed, tokens, train

import gradaccum as ga

NAN = float("nan")
DROP = {"nonfinite": "drop_micro_batch"}


@both_doors
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_one_is_left_out_with_its_weight(door, bad):
    """[g, NaN, h]: a step with g and h, their own weights."""
    model = Slope()
    optimizer = Recorder(model.parameters())
    batch = [tokens(1.0, 2.0), tokens(bad, 5.0, 5.0), tokens(9.0)]
    report, after = train(door, model, optimizer, summed, [batch, [tokens(1.0)]], **DROP)
    assert [g.item() for (g,) in optimizer.gradients] == [4.0, 1.0]
    assert (report.outcome, report.weight, report.grad_norm) == (ga.Outcome.STEPPED, 3.0, 4.0)
    assert (report.dropped, report.micro_batches, after.dropped) == (1, 2, 0)
    assert report.loss == 0.0
    assert report.samples == (2 if door == "step" else 3)


@both_doors
def test_all_are_left_out(door):
    """[NaN, NaN]: no step."""
    model = Slope()
    optimizer = Recorder(model.parameters())
    (report,) = train(door, model, optimizer, summed, [[tokens(NAN)] * 2], **DROP)
    assert (report.outcome, report.dropped) == (ga.Outcome.SKIPPED_NONFINITE, 2)
    assert optimizer.gradients == []
    assert report.samples == 0


class Rooted(Slope):
    """Its loss is finite at 0 and its gradient is not."""

    def forward(self, rows):
        return super().forward(rows).square().sqrt()


@both_doors
@pytest.mark.parametrize("nonfinite", ["skip_step", "drop_micro_batch"])
def test_the_gradient_alone(door, nonfinite):
    """NaN in the gradient only: no step, and the next one is clean."""
    model = Rooted()
    optimizer = Recorder(model.parameters())

    def loss(model, rows):
        return summed(model, rows) if rows[0, 0] == 7.0 else ga.Loss((rows @ model.w).sum(), 1)

    batches = [[tokens(1.0), tokens(7.0)], [tokens(2.0)]]
    skipped, stepped = train(door, model, optimizer, loss, batches, nonfinite=nonfinite)
    assert (skipped.outcome, skipped.dropped) == (ga.Outcome.SKIPPED_NONFINITE, 0)
    assert skipped.loss == 0.0
    assert stepped.outcome.stepped
    assert [g.item() for (g,) in optimizer.gradients] == [2.0]


def test_the_error_says_which_micro_batch():
    model = Slope()
    optimizer = Recorder(model.parameters())
    batch = [tokens(1.0), tokens(NAN), tokens(1.0)]
    with pytest.raises(ga.GradaccumError, match="micro-batch 1 is not finite"):
        train("over", model, optimizer, summed, [batch])
    assert optimizer.gradients == []
    assert model.w.grad is None


def test_weights_known_beforehand_are_refused():
    model = Slope()
    with pytest.raises(ga.GradaccumError, match="divided already"):
        ga.accumulator(
            model, Recorder(model.parameters()), summed, weigh=lambda sample: 1.0, **DROP
        )


@both_doors
def test_torch_is_not_asked_unless_told(door):
    """Only dropping waits for the device in each micro-batch."""
    assert torch.isfinite(torch.ones(1))
    model = Slope()
    (report,) = train(door, model, Recorder(model.parameters()), summed, [[tokens(1.0)] * 2])
    assert report.dropped == 0
