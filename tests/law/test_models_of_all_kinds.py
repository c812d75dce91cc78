"""Kinds of parameters and models that accumulation is known to trip over, against the full batch.

The twin is one backward of the mean over the whole effective batch, in float64, and the bare
optimizer.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradaccum as ga

CUTS = {1: [14], 3: [1, 8, 5], 7: [1, 2, 1, 4, 3, 2, 1]}


def ids(step=0):
    return torch.randint(0, 6, (14, 3), generator=torch.Generator().manual_seed(step))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x).tanh()).square().sum((1, 2))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)

    def forward(self, x):
        return self.table(x).sin().sum((1, 2))


class Frozen(Tied):
    def __init__(self):
        super().__init__()
        self.fixed = nn.Linear(6, 5).requires_grad_(False)
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.fixed(self.head(self.table(x)))).square().sum((1, 2))


class Unused(nn.Module):
    """One expert sees the samples that begin with 0, which some micro-batches lack."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x):
        first = x[:, 0] == 0
        out = torch.zeros(len(x), dtype=self.table.weight.dtype)
        for expert, chosen in ((self.experts[0], first), (self.experts[1], ~first)):
            if chosen.any():  # the third is never used
                out = out.index_put(
                    (chosen.nonzero()[:, 0],), expert(self.table(x[chosen])).square().sum((1, 2))
                )
        return out


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = parametrizations.weight_norm(nn.Linear(4, 3))
        self.turn = parametrizations.orthogonal(nn.Linear(3, 3))

    def forward(self, x):
        return self.turn(self.head(self.table(x))).pow(3).sum((1, 2))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: block(y).tanh(), x, use_reentrant=False)
        return x.sum((1, 2))


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Tied()
        self.inner.compile(backend="aot_eager")

    def forward(self, x):
        return self.inner(x)


KINDS = [Tied, Sparse, Frozen, Unused, Parametrized, Checkpointed, Compiled]


def optimizer_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def accumulated(model, optimizer, steps, pieces, between=None):
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append([None if p.grad is None else p.grad.to_dense() for p in held])
    )
    accumulator = ga.accumulator(model, optimizer)
    for step in range(steps):
        if between is not None:
            between(step, model, optimizer)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for x in accumulator.over(ids(step).split(pieces), steps=len(pieces)):
            accumulator.backward(model(x).sum(), weight=len(x))
    return found


def full(model, optimizer, steps, between=None):
    found = []
    for step in range(steps):
        if between is not None:
            between(step, model, optimizer)
        optimizer.zero_grad()
        model(ids(step)).mean().backward()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        found.append([None if p.grad is None else p.grad.to_dense() for p in held])
        optimizer.step()
    return found


def same(one, other):
    assert (one - other).norm() <= 1e-10 * other.norm() + 1e-13


def compare(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                same(one, other)


@pytest.mark.parametrize("count", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_the_full_batch(kind, count):
    torch.manual_seed(1)
    model = kind().double()
    twin = kind().double()
    twin.load_state_dict(model.state_dict())
    expected = full(twin, optimizer_of(twin), 3)
    compare(accumulated(model, optimizer_of(model), 3, CUTS[count]), expected)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        same(one, other)


@pytest.mark.parametrize("count", CUTS)
@pytest.mark.parametrize("late", ["unfrozen", "added"])
def test_parameters_that_come_later(late, count):
    def between(step, model, optimizer):
        if step == 1 and late == "unfrozen":
            model.fixed.requires_grad_(True)
        elif step == 1:
            optimizer.add_param_group({"params": list(model.fixed.parameters()), "lr": 0.1})
            model.fixed.requires_grad_(True)

    torch.manual_seed(1)
    model = Frozen().double()
    twin = copy.deepcopy(model)
    held = {"unfrozen": lambda m: m.parameters(), "added": lambda m: m.table.parameters()}[late]
    optimizers = [torch.optim.SGD(held(m), lr=0.05) for m in (model, twin)]
    expected = full(twin, optimizers[1], 3, between)
    compare(accumulated(model, optimizers[0], 3, CUTS[count], between), expected)


def test_sparse_sums_are_no_larger_than_what_they_touch():
    """Autograd puts the rows of each micro-batch behind those of the one before."""
    model = Sparse().double()
    accumulator = ga.accumulator(model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
    for x in accumulator.over([ids()] * 50, steps=50):
        if model.table.weight.grad is not None:
            assert model.table.weight.grad._nnz() <= 6
        accumulator.backward(model(x).sum(), weight=len(x))


class Replayed(nn.Module):
    """Its first gradient of an effective batch lies in a buffer that each forward overwrites.

    As with CUDA graphs, whose replay writes where the last one did.
    """

    def __init__(self, every):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.buffer = torch.zeros(1, dtype=torch.float64)
        self.every, self.came = every, 0
        self.w.register_post_accumulate_grad_hook(self.lend)

    def lend(self, w):
        if self.came % self.every == 0:
            self.buffer.copy_(w.grad)
            w.grad = torch.empty(0, dtype=torch.float64).set_(
                self.buffer.untyped_storage(), 0, (1,)
            )
        self.came += 1

    @torch.compiler.disable
    def forward(self, x):
        self.buffer.fill_(1e3)
        return (x @ self.w).sum()


def test_a_gradient_whose_memory_is_used_again():
    """M12, pytorch#96693: four micro-batches of a compiled model equal eager, twice."""
    model = Replayed(4)
    model.compile(backend="eager")
    accumulator = ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0))
    rows = torch.tensor([1.0, 2.0, 3.0, 6.0] * 2, dtype=torch.float64).reshape(8, 1, 1)
    for x in accumulator.over(rows, steps=4):
        accumulator.backward(model(x), weight=1)
    assert model.w.item() == -6.0


def hooks(parameters, make):
    """Step and clear in the hook of each parameter, as 'fused backward' does."""
    for p in parameters:
        optimizer = make([p])

        def hook(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_inside_backward_is_refused(fused):
    """M6, LLaMA-Factory#5887: hooks would give -0.4; a refusal, and nothing has moved."""
    model = nn.Linear(1, 1)
    before = [p.clone() for p in model.parameters()]
    hooks(model.parameters(), lambda p: torch.optim.Adam(p, lr=0.1, fused=fused))
    accumulator = ga.accumulator(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for x in accumulator.over([torch.ones(1, 1)] * 4, steps=4):
        with pytest.raises(ga.GradaccumError, match="step or clear inside backward"):
            accumulator.backward(model(x).sum() / 4, weight=1)
        break
    assert all(map(torch.equal, model.parameters(), before))
    assert all(p.grad is None for p in model.parameters())


def test_a_hook_that_only_clears_is_refused():
    model = nn.Linear(1, 1)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    accumulator = ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in accumulator.over([torch.ones(1, 1)] * 4, steps=4):
        with pytest.raises(ga.GradaccumError, match="step or clear inside backward"):
            accumulator.backward(model(x).sum(), weight=1)
        break


def test_a_hook_that_looks_is_let_be():
    model, seen = nn.Linear(1, 1), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    accumulator = ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in accumulator.over([torch.ones(1, 1)] * 3, steps=3):
        accumulator.backward(model(x).sum(), weight=1)
    assert seen == [1.0, 2.0, 3.0]
    assert len(model.weight._post_accumulate_grad_hooks) == 1


def test_a_hook_that_only_steps_is_refused():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.item()
    model.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    accumulator = ga.accumulator(model, optimizer)
    for x in accumulator.over([torch.ones(1, 1)] * 4, steps=4):
        with pytest.raises(ga.GradaccumError, match="step or clear inside backward"):
            accumulator.backward(model(x).sum(), weight=1)
        break
    assert model.weight.item() == before
