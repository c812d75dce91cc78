"""The update of the full batch, over ranks, to rounding: against one process, in float64."""

from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum as ga
from gradaccum.errors import ArgumentError, NonFiniteError
from gradaccum.outcome import Counters

STEPS = 5
SAMPLES = [
    {"input_ids": list(range(n % 7, n % 7 + n)), "labels": list(range(n))}
    for n in (3, 11, 2, 7, 5, 2, 13, 4, 6, 3, 9, 2, 8, 5, 4, 3, 12)
]
LENGTHS = [len(sample["input_ids"]) for sample in SAMPLES]
PAD = {"input_ids": 0, "labels": -100}


class Net(nn.Module):
    """Has one layer for some samples alone, which a rank may then not reach."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(20, 6, sparse=sparse)
        self.rare, self.head = nn.Linear(6, 6), nn.Linear(6, 13)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        self.seen += ids.numel()
        hidden = self.embed(ids)
        rows = ids[:, :1] < 2
        return self.head(hidden + rows[..., None] * self.rare(hidden) if rows.any() else hidden)


def loss(model, micro):
    return ga.losses.causal_cross_entropy(model(micro["input_ids"]), micro["labels"])


def built(rank, model):
    """Return a model as it is in one process, or wrapped for its ranks."""
    return model if rank is None else DistributedDataParallel(model)


def net(rank, **kinds):
    torch.manual_seed(1 if not rank else 2)  # wrapping takes over the parameters of the first rank
    return built(rank, Net(**kinds).double())


def numbers(report):
    return (
        report.loss,
        report.grad_norm,
        report.lr,
        report.weight,
        report.samples,
        report.tokens,
        report.outcome,
        report.optimizer_step,
    )


def state(model):
    return [p.detach().clone() for p in model.parameters()]


def trained(rank, make, size, micro, sparse):
    """Train with whole effective batches, of which ranks take shares; the last may be tiny."""
    model = net(rank, sparse=sparse)
    optimizer = make(model.parameters())
    accumulator = ga.accumulator(
        model,
        optimizer,
        loss,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        max_grad_norm=0.5,
        pad=PAD,
        micro_batch_tokens=micro,
        ema=None if sparse else ga.EMA(model if rank is None else model.module, decay=0.5),
    )
    batches = ga.effective_batches(SAMPLES, size, seed=3, steps=STEPS, lengths=LENGTHS)
    reports = [numbers(accumulator.step(batch)) for batch in batches]
    found = accumulator.evaluate(next(iter(batches)))
    return reports, (found.loss, found.weight, found.samples, found.tokens), state(model)


def close(found, expected):
    """Whether numbers and tensors in tuples and lists agree to rounding."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, torch.Tensor):
        return torch.allclose(found, expected, rtol=1e-10, atol=1e-13)
    return found == (
        pytest.approx(expected, rel=1e-10, abs=1e-13, nan_ok=True)
        if isinstance(expected, float)
        else expected
    )


@pytest.mark.parametrize(
    ("make", "size", "sparse"),
    [
        pytest.param(partial(torch.optim.AdamW, lr=0.01), 6, False, id="AdamW, 6"),
        pytest.param(partial(torch.optim.SGD, lr=0.1, momentum=0.9), 16, False, id="the last is 1"),
        pytest.param(partial(torch.optim.SGD, lr=0.1), {0: 1, 1: 6}, False, id="the first is 1"),
        pytest.param(partial(torch.optim.SGD, lr=0.1), 6, True, id="sparse"),
        pytest.param(partial(torch.optim.AdamW, lr=0.01, fused=True), 9, False, id="fused"),
    ],
)
def test_ranks_make_the_update_of_one_process(on_ranks, make, size, sparse):
    alone = trained(None, make, size, 40, sparse)
    first, second = on_ranks(trained, make, size, 25, sparse)
    assert close(first, alone)
    assert close(second, alone)
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


def own_loop(rank, cuts):
    """Each rank reads its own micro-batches: of one process, those of both."""
    model = net(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accumulator = ga.accumulator(model, optimizer, max_grad_norm=0.5)
    mine = SAMPLES if rank is None else SAMPLES[rank::2]
    size = cuts[rank or 0]
    reports = []
    for _ in range(STEPS):
        micros = [mine[k : k + size] for k in range(0, len(mine), size)]
        for micro in accumulator.over(micros, steps=len(micros)):
            parts = [
                loss(model, {k: torch.tensor([v]) for k, v in sample.items()}) for sample in micro
            ]
            report = accumulator.backward(
                sum(part.sum for part in parts), weight=sum(part.weight for part in parts)
            )
        reports.append((report.loss, report.grad_norm, report.weight))
    return reports, state(model)


def test_a_loop_of_ones_own_may_take_other_micro_batches_on_each_rank(on_ranks):
    alone = own_loop(None, [99])
    for found in on_ranks(own_loop, [2, 5]):
        assert close(found, alone)


def sums(optimizer):
    held = optimizer.param_groups[0]["params"]
    return [p.grad.clone() for p in held if p.grad is not None]


def pair(rank, every):
    """A discriminator that steps every so often, and a generator whose pass goes through it."""
    torch.manual_seed(0)
    g, d = (built(rank, nn.Linear(4, 4).double()) for _ in range(2))
    models = {"d": d, "g": nn.ModuleList([g, d])}
    optimizers = {
        "d": torch.optim.AdamW(d.parameters(), lr=0.02),
        "g": torch.optim.AdamW(g.parameters(), lr=0.01),
    }
    accumulators = {name: ga.accumulator(models[name], optimizers[name]) for name in "dg"}
    draws = torch.Generator().manual_seed(5)
    shares = [torch.randn(25, n, 4, generator=draws, dtype=torch.float64) for n in (3, 5)]
    rows = torch.cat(shares, 1) if rank is None else shares[rank]
    losses = {
        "d": lambda z: nn.functional.softplus(d(g(z).detach())).sum() + d(z).square().sum(),
        "g": lambda z: nn.functional.softplus(-d(g(z))).sum(),
    }
    loops = {
        name: accumulators[name].over(iter(rows[:20] if name == "d" else rows), steps=every[name])
        for name in "dg"
    }
    reports = defaultdict(list)
    for _ in range(25):
        for name, other in ("dg", "gd"):
            if (z := next(loops[name], None)) is None:
                continue  # the other's goes on
            held = sums(optimizers[other])
            report = accumulators[name].backward(losses[name](z), weight=len(z) * 4)
            assert close(sums(optimizers[other]), held)
            if report is not None:
                reports[name].append((report.loss, report.grad_norm, report.weight))
    assert [len(reports[name]) for name in "dg"] == [20 // every["d"], 25 // every["g"]]
    return reports["d"], reports["g"], state(models["g"])


def test_two_accumulators_each_with_its_own_effective_batch(on_ranks):
    every = {"d": 2, "g": 5}
    alone = pair(None, every)
    for found in on_ranks(pair, every):
        assert close(found, alone)


def two_terms(rank):
    """A term that some samples, and so perhaps a whole rank, do not have."""
    model = net(rank)

    def terms(model, micro):
        found = {"ce": loss(model, micro)}
        if (long := micro["input_ids"][:, 9:]).any():
            weight = int((micro["labels"][:, 9:] >= 0).sum())
            found["long"] = ga.Loss(model(long).square().sum(), weight)
        return found

    def weigh(sample):
        n = len(sample["labels"])
        return {"ce": n - 1, "long": n - 9} if n > 9 else {"ce": n - 1}

    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        terms,
        pad=PAD,
        micro_batch_size=1,
        weigh=weigh,
        verify="never",
    )
    batches = ga.effective_batches(SAMPLES, 3, seed=3, steps=STEPS, lengths=LENGTHS)
    reports = [accumulator.step(batch) for batch in batches]
    named = [{k: (t.loss, t.weight) for k, t in report.terms.items()} for report in reports]
    return list(zip(named, map(numbers, reports), strict=True)), state(model)


def test_weights_of_terms_are_those_of_all_ranks(on_ranks):
    reports, parameters = two_terms(None)
    assert {len(terms) for terms, _ in reports} == {1, 2}
    for found, moved in on_ranks(two_terms):
        assert close(moved, parameters)
        for (terms, rest), (expected, others) in zip(found, reports, strict=True):
            assert close(rest, others)
            assert terms.keys() == expected.keys()
            assert all(close(terms[name], expected[name]) for name in expected)


def narrow(rank, full):
    """Memory that is full on the last rank alone; gradient sums of bfloat16 parameters."""
    model, seen = net(rank).to(torch.bfloat16), []

    def hungry(model, micro):
        seen.append(len(micro["input_ids"]))
        if full and rank == 1 and len(seen) > 1 and seen[-1] > 2:
            raise torch.OutOfMemoryError("full")
        return loss(model, micro)

    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        hungry,
        pad=PAD,
        micro_batch_size=4,
        verify="never",
    )
    batch = next(iter(ga.effective_batches(SAMPLES, 16, seed=3, lengths=LENGTHS)))
    report = accumulator.step(batch)
    return report.replays, report.micro_batches, report.loss, state(model)


def test_a_rank_that_ran_out_of_memory_runs_its_share_again(on_ranks):
    (_, _, value, parameters), _ = on_ranks(narrow, False)
    first, second = on_ranks(narrow, True)
    assert (first[0], second[0] > 0) == (0, True)
    assert second[1] > first[1]
    for found in (first, second):
        assert found[2] == pytest.approx(value, rel=1e-2)
        for a, b in zip(found[3], parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(first[3], second[3], strict=True))


def bad_samples(rank, nonfinite, bad):
    """A loss that is not a number wherever the first label is among some."""
    model = net(rank)

    def sometimes(model, micro):
        found = loss(model, micro)
        nan = any(len(row[row >= 0]) in bad for row in micro["labels"])
        return ga.Loss(found.sum * float("nan"), found.weight) if nan else found

    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        sometimes,
        pad=PAD,
        micro_batch_size=1,
        nonfinite=nonfinite,
        verify="never",
    )
    batches = iter(ga.effective_batches(SAMPLES, 16, seed=3, lengths=LENGTHS))
    try:
        report = accumulator.step(next(batches))
    except NonFiniteError as error:
        return str(error), accumulator.counters, model.state_dict()
    return (*numbers(report), report.dropped), state(model)


@pytest.mark.parametrize("bad", [{13, 2}, set(range(14))], ids=["some", "all"])
def test_samples_are_left_out_on_whatever_rank_they_are(on_ranks, bad):
    alone = bad_samples(None, "drop_micro_batch", bad)
    assert alone[0][-1] == (16 if len(bad) > 2 else 3)
    for found in on_ranks(bad_samples, "drop_micro_batch", bad):
        assert close(found, alone)


def test_all_ranks_raise_where_one_of_them_has_a_bad_sample(on_ranks):
    before = bad_samples(None, "skip_step", {13})[1]
    for message, counters, parameters in on_ranks(bad_samples, "raise", {13}):
        assert "finite" in message
        assert counters == Counters()
        assert close([v for k, v in parameters.items() if "seen" not in k], before)
        assert parameters["module.seen"] == 0


def normed(rank):
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    model = built(rank, norm)
    accumulator = ga.accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.randn(4, 5, 3, dtype=torch.float64) + rank
    for micro in accumulator.over(rows, steps=4):
        accumulator.backward(model(micro).square().sum(), weight=5)
    return dict(norm.named_buffers())


def test_buffers_are_those_of_the_first_rank(on_ranks):
    first, second = on_ranks(normed)
    assert close(list(second.values()), list(first.values()))


def differing(rank, lengths):
    model = net(rank)
    accumulator = ga.accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, pad=PAD, micro_batch_size=4
    )
    with pytest.raises(ArgumentError) as caught:
        accumulator.step(next(iter(ga.effective_batches(SAMPLES, 6, seed=rank, lengths=lengths))))
    return str(caught.value)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["read", "unread"])
def test_ranks_that_have_other_samples_are_told(on_ranks, lengths):
    first, second = on_ranks(differing, lengths)
    assert first == second
    assert "same effective batch on every rank" in first


def refused(rank):
    told = []
    hooked, mixed, other = (net(rank) for _ in range(3))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    mixed.mixed_precision = torch.distributed.fsdp.MixedPrecision()
    elsewhere = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group([0, 1]))
    sharded = torch.distributed.fsdp.fully_shard(nn.Linear(2, 2))
    for model in (hooked, mixed, nn.ModuleList([other, elsewhere]), sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ArgumentError) as caught:
            ga.accumulator(model, optimizer)
        told.append(caught.value.got)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ArgumentError) as caught:
        ga.accumulator(other, optimizer, scaler=torch.amp.GradScaler("cpu"))
    return [*told, caught.value.got]


def test_what_would_reduce_otherwise_is_refused(on_ranks):
    hook, mixed, groups, sharded, scaler = on_ranks(refused)[0]
    assert "one, which would not be called" in hook
    assert "mixed" in mixed or "autocast" in mixed
    assert groups == "2 groups"
    assert sharded.startswith("FSDPModule")
    assert "2 ranks" in scaler
