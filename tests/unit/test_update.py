"""Against the textbook: divide each gradient, `clip_grad_norm_`, step."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from gradaccum.errors import ArgumentError
from gradaccum.update import Update, advance

WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}
OPTIMIZERS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad]


def parts(dtype=torch.float32, way="plain", optimizer=torch.optim.AdamW):
    """Return a model with gradient sums, and an optimizer; the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).to(dtype)
    for p in model.parameters():
        p.grad = 10 * torch.randn_like(p)
    return model, optimizer(model.parameters(), lr=0.1, **WAYS[way])


def sums(*models):
    return [[p.grad for p in model.parameters() if p.grad is not None] for model in models]


@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("weight", [1.0, 7.0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_one_pass_does_what_the_textbook_does(way, optimizer, weight, max_grad_norm):
    model, fast = parts(way=way, optimizer=optimizer)
    twin, slow = parts(optimizer=optimizer)
    update = Update(optimizers=(fast,), max_grad_norm=max_grad_norm)
    norms = update.norms(sums(model)).tolist()
    update(sums(model), scales=update.scales(divisor=weight, norms=norms))
    for p in twin.parameters():
        p.grad /= weight
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(twin.parameters(), max_grad_norm)
    slow.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_on_the_optimizer(way):
    model, optimizer = parts(way=way)
    before = set(vars(optimizer))
    Update(optimizers=(optimizer,))(sums(model), scales=[0.3])
    assert set(vars(optimizer)) == before


def test_nothing_is_left_on_an_optimizer_that_raises():
    model, optimizer = parts(way="fused")
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Update(optimizers=(optimizer,))(sums(model), scales=[0.3])
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


@pytest.mark.parametrize("way", WAYS)
def test_double_precision_is_kept(way):
    model, optimizer = parts(torch.float64, way, torch.optim.SGD)
    before = copy.deepcopy(list(model.parameters()))
    grads = [p.grad.clone() for p in model.parameters()]
    Update(optimizers=(optimizer,))(sums(model), scales=[1 / 3])
    for p, old, grad in zip(model.parameters(), before, grads, strict=True):
        torch.testing.assert_close(p, old - 0.1 * grad / 3, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("ways", [("fused", "plain"), ("plain", "fused"), ("fused", "fused")])
def test_several_optimizers_are_scaled_alike(ways):
    models, optimizers = zip(*[parts(way=way) for way in ways], strict=True)
    Update(optimizers=optimizers)(sums(*models), scales=[0.25, 0.25])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_gradient_at_all(way, optimizer):
    model, optimizer = parts(way=way, optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    Update(optimizers=(optimizer,))([[]], scales=[0.5])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("bound", "grad_norm", "expected"), [(None, 100.0, 0.5), (1.0, 0.2, 0.5), (1.0, 4.0, 0.125)]
)
def test_the_one_number(bound, grad_norm, expected):
    update = Update(optimizers=(parts()[1],), max_grad_norm=bound)
    (scale,) = update.scales(divisor=2.0, norms=[2.0 * grad_norm])
    assert scale == pytest.approx(expected, rel=1e-6)
    assert update.lr == 0.1


@pytest.mark.parametrize("bound", [0, -1.0, float("nan")])
def test_bounds_are_positive(bound):
    with pytest.raises(ArgumentError, match="max_grad_norm=None"):
        Update(optimizers=(parts()[1],), max_grad_norm=bound)


def test_schedulers_move_by_one():
    _, optimizer = parts()
    by_step = StepLR(optimizer, step_size=1, gamma=0.5)
    by_loss = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    optimizer.step()
    advance(by_step, 3.0)
    for loss in (3.0, 4.0):
        advance(by_loss, loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 * 0.1)
    assert by_loss.best == 3.0
