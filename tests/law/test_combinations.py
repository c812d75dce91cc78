"""Every optimizer and every scheduler of torch: five steps equal the full batch's, in float64.

The twin is the textbook: one backward of the mean over the whole batch, `clip_grad_norm_` for what
is clipped together, `optimizer.step()`, `scheduler.step()`.
"""

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler as schedulers

import gradaccum as ga

STEPS, SAMPLES = 5, 14
OWN_CLIP, CLIP = 0.02, 0.4

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if kind not in {torch.optim.Optimizer, torch.optim.LBFGS}
}
OPTIONS = {"SGD": {"momentum": 0.9, "nesterov": True}, "RMSprop": {"momentum": 0.5}}

S = schedulers
SCHEDULERS = {
    "LambdaLR": partial(S.LambdaLR, lr_lambda=lambda k: 0.9**k),
    "MultiplicativeLR": partial(S.MultiplicativeLR, lr_lambda=lambda k: 0.9),
    "StepLR": partial(S.StepLR, step_size=2),
    "MultiStepLR": partial(S.MultiStepLR, milestones=[1, 3]),
    "ConstantLR": partial(S.ConstantLR, total_iters=2),
    "LinearLR": partial(S.LinearLR, total_iters=4),
    "ExponentialLR": partial(S.ExponentialLR, gamma=0.8),
    "PolynomialLR": partial(S.PolynomialLR, total_iters=4),
    "CosineAnnealingLR": partial(S.CosineAnnealingLR, T_max=4),
    "CosineAnnealingWarmRestarts": partial(S.CosineAnnealingWarmRestarts, T_0=2),
    "CyclicLR": partial(
        S.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=2, cycle_momentum=False
    ),
    "OneCycleLR": partial(S.OneCycleLR, max_lr=1e-2, total_steps=STEPS + 1, cycle_momentum=False),
    "ReduceLROnPlateau": partial(S.ReduceLROnPlateau, patience=0, threshold=0.5, factor=0.3),
    "SequentialLR": lambda optimizer: S.SequentialLR(
        optimizer,
        [S.LinearLR(optimizer, total_iters=2), S.ExponentialLR(optimizer, 0.7)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda optimizer: S.ChainedScheduler(
        [S.LinearLR(optimizer, total_iters=3), S.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "SWALR": partial(torch.optim.swa_utils.SWALR, swa_lr=1e-4, anneal_epochs=3),
}


def test_no_scheduler_of_torch_is_forgotten():
    bases = {"LRScheduler", "Optimizer"}
    known = {
        name
        for name, kind in vars(schedulers).items()
        if inspect.isclass(kind) and issubclass(kind, schedulers.LRScheduler)
    }
    assert {name for name in known if not name.startswith("_")} - bases == {*SCHEDULERS} - {"SWALR"}


class Net(nn.Module):
    """Two matrices, as Muon takes nothing else, and a table whose gradients may be sparse."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=sparse)
        self.last = None if sparse else nn.Linear(4, 2, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = self.table(ids)
        return inner.tanh() if self.last is None else self.last(inner.tanh())


def losses(model, ids, weights):
    """Return each sample's loss, weighed."""
    return (model(ids) - ids[:, None] / 4).square().sum(1) * weights


def batch(step):
    rng = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 9, (SAMPLES,), generator=rng)
    weights = torch.rand(SAMPLES, generator=rng, dtype=torch.float64) * (torch.arange(14) % 4 > 0)
    return ids, weights


def parts(name, scheduler):
    """Return a model, its optimizer with two groups of their own settings, and a scheduler."""
    torch.manual_seed(3)
    sparse = name == "SparseAdam"
    model = Net(sparse=sparse).double()
    groups = [{"params": [model.table.weight], "lr": 3e-3, "max_grad_norm": OWN_CLIP}]
    if not sparse:
        groups.append({"params": [model.last.weight]})
        if "weight_decay" in inspect.signature(OPTIMIZERS[name]).parameters:
            groups[0]["weight_decay"] = 0.2
    optimizer = OPTIMIZERS[name](groups, lr=1e-2, **OPTIONS.get(name, {}))
    return model, optimizer, SCHEDULERS[scheduler](optimizer)


def textbook(model, optimizer, scheduler):
    told = []
    for step in range(STEPS):
        ids, weights = batch(step)
        mean = losses(model, ids, weights).sum() / weights.sum()
        optimizer.zero_grad()
        mean.backward()
        norms = []
        for group, bound in zip(optimizer.param_groups, (OWN_CLIP, CLIP), strict=False):
            gradients = [p.grad for p in group["params"]]
            if gradients[0].is_sparse:  # torch cannot clip it
                (parameter,) = group["params"]
                total = parameter.grad.coalesce()
                norms.append(total.values().norm())
                parameter.grad = total * min(1.0, bound / (norms[-1].item() + 1e-6))
            else:
                norms.append(clip_grad_norm_(group["params"], bound))
        told.append((mean.item(), torch.stack(norms).norm().item(), rates(optimizer)[0]))
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(mean.item())
        else:
            scheduler.step()
    return told


def accumulated(model, optimizer, scheduler, micro_batches):
    accumulator = ga.accumulator(model, optimizer, scheduler=scheduler, max_grad_norm=CLIP)
    told = []
    for step in range(STEPS):
        ids, weights = batch(step)
        cuts = list(range(1, micro_batches))  # the first ones of one sample, the last of the rest
        micros = zip(ids.tensor_split(cuts), weights.tensor_split(cuts), strict=True)
        for some, weight in accumulator.over(micros, steps=micro_batches):
            report = accumulator.backward(losses(model, some, weight).sum(), weight=weight.sum())
        told.append((report.loss, report.grad_norm, report.lr))
        assert report.micro_batches == micro_batches
        assert report.samples == SAMPLES
    assert accumulator.counters.optimizer_steps == STEPS
    return told


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning")
def test_five_steps_equal_the_full_batch(optimizer, scheduler):
    reference = parts(optimizer, scheduler)
    expected = textbook(*reference)
    for micro_batches in (1, 3, 7):
        mine = parts(optimizer, scheduler)
        told = accumulated(*mine, micro_batches)
        close(torch.tensor(told).double(), torch.tensor(expected).double())
        close(rates(mine[1]), rates(reference[1]))
        for one, other in zip(mine[0].parameters(), reference[0].parameters(), strict=True):
            close(one, other)


def test_lbfgs_is_refused_by_name():
    model = nn.Linear(1, 1)
    with pytest.raises(ga.GradaccumError, match="LBFGS, which evaluates the loss anew"):
        ga.accumulator(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_learning_rate_that_follows_the_size(fused):
    """By the root of the size, for one step each; schedulers know nothing of it."""
    data = [{"x": torch.tensor([float(k)])} for k in range(24)]
    model, twin = nn.Linear(1, 1), nn.Linear(1, 1)
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = S.StepLR(optimizer, 1, gamma=0.5)
    batches = ga.effective_batches(data, {0: 4, 2: 16}, lr_rule="sqrt", shuffle=False)
    accumulator = ga.accumulator(
        model,
        optimizer,
        lambda m, micro: ga.Loss.of(m(micro["x"]).square()),
        scheduler=scheduler,
        micro_batch_size=3,
    )
    reports = [accumulator.step(batch) for batch in batches]
    assert [report.samples for report in reports] == [4, 4, 16]
    assert [report.lr for report in reports] == [0.1, 0.05, 0.025 * 2]
    assert rates(optimizer) == [0.0125]
    slow = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for start, stop, lr in ((0, 4, 0.1), (4, 8, 0.05), (8, 24, 0.05)):
        slow.param_groups[0]["lr"] = lr
        slow.zero_grad()
        twin(torch.arange(start, stop).float()[:, None]).square().mean().backward()
        slow.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_learning_rate_is_put_back_where_the_optimizer_raises():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    batches = ga.effective_batches(
        [(torch.ones(1),)] * 6, lambda progress: 2 + 4 * progress.steps, lr_rule="linear"
    )
    accumulator = ga.accumulator(
        model, optimizer, lambda m, micro: ga.Loss.of(m(micro[0])), micro_batch_size=2
    )
    for batch in batches:
        batch.lr_scale = 3.0
        with pytest.raises(ZeroDivisionError):
            accumulator.step(batch)
    assert rates(optimizer) == [0.1]
