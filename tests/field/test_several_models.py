"""Field cases G: several models and averages, each with sums and steps of its own."""

import pytest
import torch
from helpers.training import Slope, both_doors, exactly, summed, tokens, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradaccum as ga


def test_a_pass_through_another_leaves_its_sums_alone():
    """G1, Lightning#591, #5054: D's sums are bit-equal to those without G's backward between."""
    for between in (False, True):
        torch.manual_seed(0)
        pair = nn.ModuleDict({"g": nn.Linear(3, 2), "d": nn.Linear(2, 1)}).double()
        doing = {k: ga.accumulator(pair, torch.optim.SGD(pair[k].parameters(), 1.0)) for k in "gd"}
        noise = torch.randn(4, 5, 3, dtype=torch.float64)
        generator = doing["g"].over(noise, steps=5)
        for k, real in enumerate(doing["d"].over(torch.randn(4, 5, 2).double(), steps=4)):
            doing["d"].backward(pair["d"](real).square().sum(), weight=5 + k)
            if between and k < 3:
                doing["g"].backward(pair["d"](pair["g"](next(generator))).sum(), weight=5)
            if k == 2:
                sums = [p.grad.clone() for p in pair["d"].parameters()]
        if not between:
            expected = sums, [p.detach().clone() for p in pair["d"].parameters()]
        else:
            assert all(map(torch.equal, sums, expected[0]))
            assert all(map(torch.equal, pair["d"].parameters(), expected[1]))
            assert doing["g"].counters.micro_steps == 3
        generator.close()


def test_each_has_its_own_effective_batch():
    """D every 2, G every 5, side by side: counters, steps and parameters apart."""
    pair = nn.ModuleDict({"d": Slope(start=1.0), "g": Slope(start=1.0)})
    doing = {k: ga.accumulator(pair, torch.optim.SGD(pair[k].parameters(), lr=0.1)) for k in "dg"}
    rows = [tokens(float(k)) for k in range(10)]
    d, g = doing["d"].over(rows, steps=2), doing["g"].over(rows, steps=5)
    for one, other in zip(d, g, strict=True):
        loss = pair["d"](one) * pair["g"](one)
        doing["d"].backward(loss.sum(), weight=1)
        doing["g"].backward((pair["d"](other) * pair["g"](other)).sum(), weight=1)
    assert [doing[k].counters.optimizer_steps for k in "dg"] == [5, 2]
    assert [doing[k].counters.micro_steps for k in "dg"] == [10, 10]


@both_doors
@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_an_average_moves_once_per_update(door, kind):
    """G2, Lightning#11688, F5-TTS#631: decay 0.9, N = 4, one update: 0.9 of the old weight."""
    model = Slope(start=1.0)
    if kind == "ours":
        ema = ga.EMA(model, decay=0.9)
    else:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        ema.update_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = [[tokens(2.0)] * 4, [tokens(float("nan"))] * 2]
    train(door, model, optimizer, summed, batches, ema=ema, nonfinite="skip_step")
    assert ema.module.w.item() == exactly(0.9 * 1.0 + 0.1 * -1.0)


def test_an_average_of_a_part():
    pair = nn.ModuleDict({"g": Slope(start=1.0), "d": Slope()})
    ema = ga.EMA(pair["g"], decay=0.5)
    assert [name for name, _ in ema.named_parameters()] == ["module.w"]
    optimizer = torch.optim.SGD(pair["g"].parameters(), lr=1.0)
    train("over", pair, optimizer, lambda m, x: summed(m["g"], x), [[tokens(1.0)]], ema=[ema])
    assert ema.module.w.item() == exactly(0.5)


@pytest.mark.parametrize("decay", [1.0, -0.1, "0.9", float("nan")])
def test_bad_decays(decay):
    with pytest.raises(ga.GradaccumError, match="share of at least 0"):
        ga.EMA(Slope(), decay=decay)


def test_what_is_no_average():
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ga.GradaccumError, match=r"accumulator\(ema=...\).*gradaccum\.EMA"):
        ga.accumulator(model, optimizer, ema=model)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_16_bit_weights_are_averaged_in_float32(use_buffers):
    """A thousandth of a step is lost in bfloat16: 1.0 and 1e-3 * (2.0 - 1.0) are 1.0."""
    model = nn.BatchNorm1d(3).bfloat16()
    ema = ga.EMA(model, decay=0.999, use_buffers=use_buffers)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.running_mean.fill_(4.0)
    ema.update_parameters(model)
    torch.testing.assert_close(ema.module.weight, nn.Parameter(torch.full((3,), 1.001)))
    mean = 0.004 if use_buffers else 4.0
    torch.testing.assert_close(ema.module.running_mean, torch.full((3,), mean))
    assert ema.module.num_batches_tracked.dtype == torch.long
    assert model.weight.dtype == torch.bfloat16
