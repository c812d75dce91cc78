"""Field case M11, NeMo#11272, Lightning#5243: losses and gradients that are not finite."""

import pytest
import torch
from helpers.training import Recorder, Slope, both_doors, summed, tokens, train
from torch import nn

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


class Risky(nn.Module):
    """A logarithm in the middle."""

    def forward(self, x):
        return x.log()


def risky_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 1), Risky(), nn.Linear(1, 1), nn.Dropout(0.01))


def dataset():
    """Return samples of which 5 and 11 go through the logarithm below 0."""
    return [{"x": torch.tensor([-9.0 if k in {5, 11} else 1.0 + k])} for k in range(16)]


def by_sum(model, micro):
    return ga.Loss.of(model(micro["x"]).square())


def told_by(model, loss=by_sum, samples=None, **options):
    model[0].weight.data.fill_(1.0)
    model[0].bias.data.fill_(0.0)
    batches = ga.effective_batches(samples or dataset(), 16, seed=1, lengths=[1] * 16)
    options = {"micro_batch_size": 3, "verify": "never"} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulator = ga.accumulator(model, optimizer, loss, **options)
    before = [p.clone() for p in model.parameters()], torch.get_rng_state()
    with pytest.raises(ga.GradaccumError) as caught:
        accumulator.step(next(iter(batches)))
    assert all(map(torch.equal, model.parameters(), before[0]))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    return str(caught.value)


@pytest.mark.parametrize("lone", [5, 11])
def test_the_error_names_the_sample_and_the_module(lone):
    samples = dataset()
    samples[16 - lone] = {"x": torch.ones(1)}
    message = told_by(risky_net(), samples=samples)
    assert f"from sample {lone} (micro-batch" in message
    assert "first in '1' (Risky)" in message


def test_an_input_that_is_not_finite():
    samples = [{"x": torch.tensor([1.0 + k])} for k in range(16)]
    samples[7] = {"x": torch.tensor([NAN])}
    assert "from sample 7 " in (message := told_by(risky_net(), samples=samples))
    assert "first in the input of '0' (Linear)" in message


def test_a_parameter_that_is_not_finite():
    model = risky_net()
    model[2].weight.data.fill_(NAN)
    with pytest.raises(AssertionError):  # NaN is not equal to itself
        told_by(model)
    samples = [{"x": torch.tensor([1.0 + k])} for k in range(16)]
    accumulator = ga.accumulator(
        model, torch.optim.SGD(model.parameters(), lr=1.0), by_sum, micro_batch_size=3
    )
    with pytest.raises(ga.GradaccumError, match=r"'2' \(Linear\), whose weight is not finite"):
        accumulator.step(samples)


def test_a_gradient_that_is_not_finite():
    def loss(model, micro):
        x = model(micro["x"]) * 0
        return ga.Loss(x.square().sum(1).sqrt().sum(), len(x))

    samples = [{"x": torch.tensor([1.0 + k])} for k in range(16)]
    message = told_by(risky_net(), loss, samples)
    assert "the gradient of '2." in message


def test_the_loss_function_itself():
    def loss(model, micro):
        return ga.Loss((model(micro["x"]) * 0).log().sum(), 1)

    samples = [{"x": torch.tensor([1.0 + k])} for k in range(16)]
    assert "first in the loss function" in told_by(risky_net(), loss, samples)
