"""Field cases S3, S5 and S6: a loss scale that is driven once an effective batch."""

import pytest
import torch
from helpers.training import Slope, both_doors, summed, tokens, train
from torch import nn
from torch.amp import GradScaler

import gradaccum as ga

INF = float("inf")


def scaler_of(**options):
    return GradScaler("cpu", **({"init_scale": 2.0**16} | options))


@both_doors
def test_an_overflow_skips_the_whole_step(door):
    """S3, accelerate#4242, #2828: inf in micro-batch 1 of 4: the scale is halved once."""
    model, scaler = Slope(start=1.0), scaler_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    ema = ga.EMA(model, decay=0.5)
    batches = [[tokens(INF), *[tokens(1.0)] * 3], [tokens(1.0), tokens(3.0)]]
    options = {"scaler": scaler, "scheduler": scheduler, "ema": ema}
    skipped, stepped = train(door, model, optimizer, summed, batches, **options)
    assert skipped.outcome is ga.Outcome.SKIPPED_OVERFLOW
    assert skipped.micro_batches == 4
    assert scaler.get_scale() == 2.0**15
    assert stepped.outcome is ga.Outcome.STEPPED
    assert (stepped.lr, stepped.grad_norm, stepped.loss) == (0.5, 2.0, 2.0)
    assert stepped.optimizer_step == 1
    assert scheduler.last_epoch == 1
    assert model.w.item() == 0.0
    assert ema.module.w.item() == 0.5


@both_doors
def test_gradients_are_unscaled_once(door):
    """S4 and S6, Lightning#9694: clipped after dividing by the scale and the weight."""
    model, scaler = Slope(2), scaler_of(growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    micro_batches = [tokens([3.0, 0.0]), tokens([-3.0, 4.0])]
    batches = [micro_batches] * 4
    reports = train(door, model, optimizer, summed, batches, scaler=scaler, max_grad_norm=1.0)
    assert [report.grad_norm for report in reports] == pytest.approx([2.0] * 4, rel=1e-12)
    assert model.w.tolist() == pytest.approx([0.0, -4.0], abs=1e-5)
    assert scaler.get_scale() == 2.0**18  # it grows after two steps, not after two micro-batches


def test_a_scale_that_moves_within_an_effective_batch():
    """S6, Lightning#9694: unit gradients stay 1.0, not 1.5, whoever else drives the scaler."""
    model, scaler = Slope(), scaler_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulator = ga.accumulator(model, optimizer, scaler=scaler)
    for k, rows in enumerate(accumulator.over([tokens(1.0)] * 2, steps=2)):
        accumulator.backward(summed(model, rows))
        if k == 0:
            scaler.update(2.0**17)
    assert model.w.item() == -1.0


@both_doors
def test_an_optimizer_without_gradients(door):
    """S5, Lightning#4524, #20116: left out, no assertion."""
    model = nn.ModuleList([Slope(start=1.0), Slope(start=1.0)])
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in model]
    scaler = scaler_of()

    def loss(model, rows):
        return summed(model[1], rows)

    (report,) = train(door, model, optimizers, loss, [[tokens(1.0)] * 2], scaler=scaler)
    assert report.outcome.stepped
    assert model[0].w.item() == 1.0
    assert model[1].w.item() < 1.0


@both_doors
def test_what_lowering_cannot_help_is_said(door):
    """A gradient that is not finite however small the scale is: 17 skipped steps, then an error."""
    model, scaler = Slope(), scaler_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ga.GradaccumError, match="finite loss and gradient"):
        train(door, model, optimizer, summed, [[tokens(INF)]] * 30, scaler=scaler)
    assert scaler.get_scale() == 0.5


@both_doors
@pytest.mark.parametrize("weight", [1, 1000])
def test_a_sum_overflows_no_sooner_than_a_mean(door, weight):
    """A scale of 1,024 on a sum over 2,000 rows would be out of float16's reach."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = scaler_of(init_scale=2.0**10)

    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return ga.Loss(nn.functional.mse_loss(model(x), x[:, :3], reduction="sum"), len(x))

    x = torch.randn(weight, 4)
    (report,) = train(door, model, optimizer, loss, [[x, x]], scaler=scaler)
    (plain,) = train(door, model, optimizer, loss, [[x, x]])
    assert report.outcome.stepped
    assert report.grad_norm == pytest.approx(plain.grad_norm, rel=2e-3)


@both_doors
def test_small_gradients_do_not_vanish(door):
    """Of float16 below 6e-8, where the scale is for."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return ga.Loss(model(x).sum() * 1e-9, len(x))

    x = torch.ones(2, 1)
    (scaled,) = train(door, model, optimizer, loss, [[x] * 3], scaler=scaler_of())
    (plain,) = train(door, model, optimizer, loss, [[x] * 3])
    assert plain.grad_norm == 0.0
    assert scaled.grad_norm == pytest.approx(1e-9, rel=1e-2)


@both_doors
def test_a_scaler_that_is_not_enabled(door):
    model = Slope()
    scaler = GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (report,) = train(door, model, optimizer, summed, [[tokens(1.0)] * 2], scaler=scaler)
    assert (report.outcome.stepped, model.w.item()) == (True, -1.0)
