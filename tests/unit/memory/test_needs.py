"""Predicted bytes of an optimizer, against those that its steps are seen to hold."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import gradaccum as ga
from gradaccum.accumulator import Accumulator
from gradaccum.dtypes import Masters
from gradaccum.gradients import Gradients
from gradaccum.memory import LiveBytes, held_bytes
from gradaccum.memory.needs import needs_of
from gradaccum.update import Update

OPTIMIZERS = {
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW"):
    OPTIMIZERS[name] = getattr(torch.optim, name)
for name in ("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"):
    OPTIMIZERS[name] = getattr(torch.optim, name)


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(30, 50, dtype=dtype), nn.BatchNorm1d(50, dtype=dtype), nn.Linear(50, 7)
    )
    model[2].bias.requires_grad_(False)
    return model


def tensors_of(optimizer):
    return [t for one in optimizer.state.values() for t in one.values() if torch.is_tensor(t)]


def seen(model, optimizer):
    """Return the bytes of the state after a step, and what the step needed besides."""
    meter = LiveBytes()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.1)
            meter.follow([parameter.grad])
    meter.follow(model.parameters())
    before = meter.live
    meter.follow(tensors_of(optimizer))
    with meter:
        optimizer.step()
    found = meter.live - before, meter.peak - meter.live
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_any_optimizer(name):
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user's was called"))
    numbers = [p.clone() for p in model.parameters()]
    first = needs_of(model, [optimizer])
    optimizer._optimizer_step_pre_hooks.clear()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), numbers, strict=True))
    assert all(p.grad is None for p in model.parameters())
    state, update = seen(model, optimizer)
    assert first.optimizer_state == state
    # An optimizer that looks at numbers is seen one parameter at a time, without the scalars that
    # it keeps of the others meanwhile.
    close = {"Adafactor": 0.06 * update, "ASGD": 100}.get(name, 0)
    assert first.update == pytest.approx(update, abs=close)
    steps = [t.clone() for t in tensors_of(optimizer)]
    again = needs_of(model, [optimizer])
    assert again.optimizer_state == state
    assert again.update == pytest.approx(update, abs=close)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), steps, strict=True))


def test_parts():
    model = model_of(torch.float32)
    needs = needs_of(model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    weights = 30 * 50 + 50 + 50 + 50 + 50 * 7
    assert needs.parts() == {
        "parameters": 4 * (weights + 7),
        "buffers": 4 * 50 + 4 * 50 + 8,
        "snapshot": 4 * 50 + 4 * 50 + 8,
        "gradient sums": 4 * weights,
        "optimizer state": 4 * weights,
        "master weights": 0,
        "averages": 0,
        "update": 0,
    }
    assert needs.least == needs.rest == sum(needs.parts().values())


def test_tied_weights_count_once():
    model = nn.ModuleDict({"in": nn.Embedding(50, 20), "out": nn.Linear(20, 50, bias=False)})
    model["out"].weight = model["in"].weight
    needs = needs_of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert needs.parameters == needs.gradient_sums == 4 * 50 * 20


def test_parameters_that_share_a_storage():
    flat = torch.zeros(30)
    model = nn.ParameterList([flat[:10], flat[10:18], flat[18:]])
    model[2].requires_grad_(False)
    needs = needs_of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert (needs.parameters, needs.gradient_sums) == (4 * 30, 4 * 18)
    state, _ = seen(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert needs_of(model, [momentum]).optimizer_state == state == 4 * 18


def test_several_optimizers_step_one_after_the_other():
    models = nn.ModuleList([nn.Linear(40, 40), nn.Linear(30, 30)])
    optimizers = [torch.optim.AdamW(m.parameters(), foreach=True) for m in models]
    both = needs_of(models, optimizers)
    each = [needs_of(m, [o]) for m, o in zip(models, optimizers, strict=True)]
    assert both.optimizer_state == sum(one.optimizer_state for one in each)
    assert both.update == max(one.update for one in each) > 0


def test_a_wrapper_is_looked_through():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups, self.state = optimizer.param_groups, optimizer.state

        def step(self) -> None:
            pytest.fail("the user's optimizer was stepped")

    model = model_of()
    inner = torch.optim.AdamW(model.parameters())
    assert needs_of(model, [Wrapper(inner)]) == needs_of(model, [inner])


def test_averages_are_needed_and_held():
    model = model_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = ga.EMA(model)
    size = sum(t.nbytes for t in (*average.parameters(), *average.buffers()))
    plain, averaged = (needs_of(model, [optimizer], averages=a) for a in ((), [average]))
    assert averaged.averages == averaged.least - plain.least == size
    assert held_bytes(model, [optimizer], [average]) - held_bytes(model, [optimizer]) == size


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_update_from_sums_that_are_wider_than_their_parameters(momentum):
    """They are rounded one after the other, and each wide one goes when it is."""
    model = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 40)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, foreach=True)
    needs = needs_of(model, [optimizer])
    gradients, update = Gradients(model, [optimizer]), Update(optimizers=(optimizer,))
    gradients.clear()
    gradients.add(sum(p.float().square().sum() for p in model.parameters()))
    meter = LiveBytes()
    meter.follow(p.grad for p in model.parameters())
    assert meter.live == needs.gradient_sums == 2 * needs.parameters
    with meter:
        update(gradients.tensors(), scales=[0.5], narrow=gradients.narrow)
    held = needs.gradient_sums + needs.optimizer_state
    assert meter.peak <= held + needs.update
    if not momentum:  # else its state is there only when most of the sums are gone
        assert meter.peak == held + needs.update


@pytest.mark.parametrize("masters", Masters)
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW foreach", "SGD momentum", "Adagrad"])
def test_what_16_bit_parameters_are_updated_by(masters, name):
    """State, copies and what a step needs besides, against what a second step is seen to hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 30)).bfloat16()
    optimizer = OPTIMIZERS[name](model.parameters())
    engine = Accumulator(
        model=model, update=Update(optimizers=(optimizer,)), masters=masters
    )._engine
    needs = needs_of(model, [optimizer], masters=masters)

    def prepared():
        engine.begin()
        engine.add({"": ga.Loss(model(torch.ones(3, 40).bfloat16()).float().sum(), 3.0)})

    prepared()
    engine.close()
    prepared()
    meter = LiveBytes()
    meter.follow(p.grad for p in model.parameters())
    meter.follow(model.parameters())
    held = meter.live
    meter.follow(tensors_of(optimizer))
    if engine._masters is not None:
        meter.follow(engine._masters._kept.values())
    state = meter.live - held
    with meter:
        engine.close()
    scalars = 4 * sum(t.ndim == 0 for t in tensors_of(optimizer))
    assert needs.optimizer_state + needs.master_weights == state
    assert needs.master_weights == (4 * 4290 if masters is Masters.KEPT else 0)
    assert needs.least == pytest.approx(meter.peak, abs=200 + scalars)
