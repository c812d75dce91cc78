"""Field cases W: what a sum is divided by."""

import weakref

import pytest
import torch
from helpers.meters import SavedTensors
from helpers.training import (
    Recorder,
    Slope,
    both_doors,
    exactly,
    flat,
    flat_gradient,
    summed,
    tokens,
    train,
    update,
)
from torch import nn
from torch.nn import functional

import gradaccum as ga

SIZES = [1, 2, 3, 4, 6]


@both_doors
def test_mean_of_means(door):
    """W1, transformers#24725, trl#2175: 1 token of gradient 10 and 9 of 0 make 1.0, not 5.0."""
    gradient, report = update(door, [tokens(10.0), tokens(*[0.0] * 9)])
    assert gradient.tolist() == exactly([1.0])
    assert report.weight == 10


@pytest.mark.parametrize("size", range(1, 11))
def test_mean_of_means_for_every_partition(size):
    """W1, transformers#24725, trl#2175: the same ten tokens cut in any way make 1.0."""
    ten = tokens(10.0, *[0.0] * 9)
    model = Slope()
    optimizer = Recorder(model.parameters())
    accumulator = ga.accumulator(model, optimizer, summed, micro_batch_size=size, verify="never")
    report = accumulator.step(ten)
    assert optimizer.gradients[0][0].tolist() == exactly([1.0])
    assert report.micro_batches == -(-10 // size)


class Head(nn.Module):
    """A classifier whose forward computes the loss, dividing by a count if it takes one."""

    def __init__(self, dtype=torch.float64) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=dtype)

    def losses(self, x, y):
        return functional.cross_entropy(self.linear(x), y, reduction="none")


class TakesCount(Head):
    def forward(self, x, y, num_items_in_batch=None):
        return self.losses(x, y).sum() / (num_items_in_batch or len(x))


class TakesNone(Head):
    def forward(self, x, y):
        return self.losses(x, y).mean()


class TakesAnything(Head):
    def forward(self, x, y, **kwargs):
        self.seen = kwargs
        return self.losses(x, y).mean()


def rows(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 5, dtype=dtype, generator=generator)
    return x, torch.randint(3, (count,), generator=generator)


def mean_times_count(model, micro):
    x, y = micro
    return ga.Loss(model(x, y) * len(x), len(x))


def sum_by_count_of_one(model, micro):
    x, y = micro
    return ga.Loss(model(x, y, num_items_in_batch=1), len(x))


@pytest.mark.parametrize(
    ("model_class", "loss"), [(TakesCount, sum_by_count_of_one), (TakesNone, mean_times_count)]
)
def test_loss_and_norm_do_not_grow_with_steps(model_class, loss):
    """W3, transformers#37766, axolotl#2262, LLaMA-Factory#7443: N = 8 against N = 1 is 1.00.

    In float32, where the order of additions shows: 1e-6 relative.
    """
    reports = []
    for size in (2, 16):
        model = model_class(torch.float32)
        accumulator = ga.accumulator(
            model, Recorder(model.parameters(), lr=0.0), loss, micro_batch_size=size
        )
        model.linear.load_state_dict({"weight": torch.ones(3, 5), "bias": torch.zeros(3)})
        model.linear.weight.data[0] = 0.5
        reports.append(accumulator.step(rows(16, torch.float32)))
    assert [report.micro_batches for report in reports] == [8, 1]
    assert reports[0].loss / reports[1].loss == pytest.approx(1.0, abs=1e-6)
    assert reports[0].grad_norm / reports[1].grad_norm == pytest.approx(1.0, abs=1e-6)


@both_doors
@pytest.mark.parametrize("model_class", [TakesAnything, TakesCount, TakesNone])
def test_scale_is_never_decided_from_a_signature(door, model_class):
    """W4, transformers#47688: a forward that accepts and ignores a count equals the reference."""
    x, y = rows(7)
    model = model_class()
    reference = flat_gradient(model.losses(x, y).mean(), model)
    micro_batches = [(x[:4], y[:4]), (x[4:5], y[4:5]), (x[5:], y[5:])]
    gradient, _ = update(door, micro_batches, model=model, loss=mean_times_count)
    assert gradient.tolist() == exactly(reference)
    assert getattr(model, "seen", {}) == {}


class Bigram(nn.Module):
    """A causal model that looks at one token only, so that rows may be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=torch.float64)
        self.out = nn.Linear(6, 11, dtype=torch.float64)

    def forward(self, ids):
        return self.out(self.embed(ids))


def causal(model, micro):
    return ga.losses.causal_cross_entropy(model(micro["input_ids"]), micro["labels"])


def texts(lengths):
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(11, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row} for row in ids]


def test_a_row_of_five_labels_weighs_four():
    """W5, transformers PR#46204: labels are shifted, so the first is not predicted."""
    (sample,) = texts([5])
    loss = causal(Bigram(), {name: row[None] for name, row in sample.items()})
    assert int(loss.weight) == 4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_padded_and_packed_rows_give_one_gradient(size):
    """W5, transformers PR#46204: four samples padded, cut in any way, and packed into one row."""
    samples = texts([5, 3, 7, 2])
    model = Bigram()
    packed_ids = torch.cat([sample["input_ids"] for sample in samples])[None]
    packed_labels = packed_ids.clone()
    packed_labels[0, [0, 5, 8, 15]] = -100  # nothing predicts the first token of a sample
    packed = {"input_ids": packed_ids, "labels": packed_labels}
    gradients, reports = [], []
    for batch, pad in ((packed, None), (samples, {"input_ids": 0, "labels": -100})):
        optimizer = Recorder(model.parameters(), lr=0.0)
        accumulator = ga.accumulator(model, optimizer, causal, micro_batch_size=size, pad=pad)
        reports.append(accumulator.step(batch))
        gradients.append(flat(optimizer.gradients[0]))
    assert [report.weight for report in reports] == [13, 13]
    assert [report.micro_batches for report in reports] == [1, -(-4 // size)]
    assert gradients[1].tolist() == exactly(gradients[0])
    assert reports[1].loss == exactly(reports[0].loss)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_reported_loss_is_the_loss_of_the_full_batch(size):
    """W6, transformers#35204: for every N."""
    x, y = rows(8)
    model = TakesNone()
    reference = model(x, y).item()
    accumulator = ga.accumulator(
        model, Recorder(model.parameters()), mean_times_count, micro_batch_size=size
    )
    assert accumulator.step((x, y)).loss == exactly(reference)


@pytest.mark.parametrize("reporting", [False, True])
def test_reporting_never_changes_a_gradient(reporting):
    """W6, transformers#35204: the gradient is the reference's, be the loss looked at or not."""
    x, y = rows(8)
    model = TakesNone()
    reference = flat_gradient(model(x, y), model)
    optimizer = Recorder(model.parameters())
    accumulator = ga.accumulator(model, optimizer, mean_times_count, micro_batch_size=3)
    for micro in accumulator.over([(x[:3], y[:3]), (x[3:], y[3:])], steps=2):
        loss = mean_times_count(model, micro)
        if reporting:
            loss.mean().item()
            accumulator.evaluate((x, y))
        report = accumulator.backward(loss)
        if reporting and report is not None:
            report.as_dict()
    assert flat(optimizer.gradients[0]).tolist() == exactly(reference)


@both_doors
def test_pairs_of_a_preference_loss(door):
    """W7, trl#2617, trl PR#2615: pairs per micro-batch 4, 4, 2 weigh 0.4, 0.4, 0.2."""
    pairs = [tokens(*[1.0] * 4), tokens(*[10.0] * 4), tokens(*[100.0] * 2)]
    gradient, report = update(door, pairs)
    assert gradient.tolist() == exactly([0.4 * 1 + 0.4 * 10 + 0.2 * 100])
    assert report.weight == 10


def preference(model, micro):
    chosen, rejected = micro
    margins = model(chosen) - model(rejected)
    return ga.Loss(-functional.logsigmoid(margins).sum(), len(chosen))


@both_doors
def test_preference_loss_equals_the_full_batch(door):
    """W7, trl#2617, trl PR#2615: log-sigmoid of the margins of ten pairs cut as 4, 4, 2."""
    chosen, rejected = rows(10)[0], rows(20)[0][10:]
    model = Slope(5, start=0.3)
    whole = preference(model, (chosen, rejected)).sum / 10
    reference = flat_gradient(whole, model)
    micro_batches = list(zip(chosen.split(4), rejected.split(4), strict=True))
    gradient, report = update(door, micro_batches, model=model, loss=preference)
    assert gradient.tolist() == exactly(reference)
    assert report.loss == exactly(whole.item())


def per_token(model, micro):
    return ga.losses.cross_entropy(model(micro["input_ids"]), micro["labels"])


def per_sequence(model, micro):
    return ga.losses.cross_entropy(model(micro["input_ids"]), micro["labels"], per="sequence")


def by_a_constant(model, micro):
    loss = per_token(model, micro)
    return ga.Loss(loss.sum, weight=50 * len(micro["labels"]))  # 50 to each sequence


REDUCTIONS = {
    per_token: lambda losses: torch.cat(losses).mean(),
    per_sequence: lambda losses: torch.stack([row.mean() for row in losses]).mean(),
    by_a_constant: lambda losses: torch.cat(losses).sum() / 50 / len(losses),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", REDUCTIONS)
def test_each_reduction_is_independent_of_the_partition(loss, size):
    """W8, trl#3021, trl PR#3231: per token, per sequence, by a constant."""
    samples = texts([5, 1, 9, 2, 4, 3])
    model = Bigram()
    one_by_one = [
        functional.cross_entropy(model(s["input_ids"]), s["labels"], reduction="none")
        for s in samples
    ]
    reference = flat_gradient(REDUCTIONS[loss](one_by_one), model)
    optimizer = Recorder(model.parameters())
    accumulator = ga.accumulator(
        model, optimizer, loss, micro_batch_size=size, pad={"input_ids": 0, "labels": -100}
    )
    accumulator.step(samples)
    assert flat(optimizer.gradients[0]).tolist() == exactly(reference)


def main(model, micro):
    return {"main": per_token(model, micro)}


def auxiliary(model, micro):
    penalty = model.embed(micro["input_ids"][:, 0]).square().sum()
    return {"auxiliary": 0.1 * ga.Loss(penalty, len(micro["input_ids"]))}


def both_terms(model, micro):
    return main(model, micro) | auxiliary(model, micro)


NAMES = {main: ["main"], auxiliary: ["auxiliary"], both_terms: ["main", "auxiliary"]}
WEIGHTS = {"main": len, "auxiliary": lambda ids: 1}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", NAMES)
def test_each_term_has_its_own_denominator(loss, size):
    """W9, transformers#48690, trl PR#6083: main loss by tokens, auxiliary loss by sequences."""
    samples = texts([5, 1, 9, 2, 4, 3])
    model = Bigram()
    ids = torch.cat([sample["input_ids"] for sample in samples])
    firsts = torch.stack([sample["input_ids"][0] for sample in samples])
    means = {
        "main": functional.cross_entropy(model(ids), ids),
        "auxiliary": 0.1 * model.embed(firsts).square().sum() / 6,
    }
    names = NAMES[loss]
    total = sum(means[name] for name in names)
    reference = flat_gradient(total, model)
    optimizer = Recorder(model.parameters())
    accumulator = ga.accumulator(
        model,
        optimizer,
        loss,
        micro_batch_size=size,
        pad={"input_ids": 0, "labels": -100},
        weigh=lambda sample: {name: WEIGHTS[name](sample["input_ids"]) for name in names},
    )
    report = accumulator.step(samples)
    assert flat(optimizer.gradients[0]).tolist() == exactly(reference)
    assert report.loss == exactly(total.item())
    assert {name: term.weight for name, term in report.terms.items()} == {
        name: {"main": 24.0, "auxiliary": 6.0}[name] for name in names
    }
    assert {name: term.loss for name, term in report.terms.items()} == exactly(
        {name: means[name].item() for name in names}
    )


@both_doors
def test_a_user_who_divides_as_well_gets_one_over_n(door):
    """W10, accelerate#3533, transformers#26312: gradient and reported loss are 1/N too small.

    Nothing is guessed: what the loss function returns is summed and divided by the weight alone.
    """
    micro_batches = [tokens(1.0, 3.0), tokens(2.0, 6.0), tokens(5.0, 1.0), tokens(4.0, 2.0)]

    def divided(model, rows):
        return ga.Loss(model(rows).sum() / 4, len(rows))

    gradient, report = update(door, micro_batches, model=Slope(start=1.0), loss=divided)
    assert gradient.tolist() == exactly([3.0 / 4])
    assert report.loss == exactly(3.0 / 4)


def test_a_user_who_averages_over_the_micro_batch_is_told_the_ratio():
    """W10, accelerate#3533, transformers#26312: a mean in place of a sum is 1/2 for two."""

    def averaged(model, rows):
        return ga.Loss(model(rows).mean(), len(rows))

    model = Slope(start=1.0)
    accumulator = ga.accumulator(model, Recorder(model.parameters()), averaged, micro_batch_size=2)
    with pytest.warns(ga.CutInvarianceWarning, match=r"is 0\.5 times"):
        accumulator.step(tokens(2.0, 2.0, 2.0, 2.0))


def labelled(model, micro):
    x, y = micro
    return ga.losses.cross_entropy(model.linear(x), y)


@both_doors
def test_a_micro_batch_without_labels(door):
    """W11, nanochat PR#623: micro-batches with 0 and 5 labels equal the reference of the 5."""
    x, y = rows(9)
    y[:4] = -100
    model = TakesNone()
    reference = model(x[4:], y[4:])
    expected = flat_gradient(reference, model)
    gradient, report = update(door, [(x[:4], y[:4]), (x[4:], y[4:])], model=model, loss=labelled)
    assert gradient.tolist() == exactly(expected)
    assert report.loss == exactly(reference.item())
    assert report.weight == 5


@both_doors
def test_an_effective_batch_without_labels(door):
    """W11, nanochat PR#623: no optimizer step, `skipped_empty`; nothing but a counter moves."""
    x, y = rows(8)
    y[:] = -100
    model = TakesNone()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Recorder(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    micro_batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    (report,) = train(door, model, optimizer, labelled, [micro_batches], scheduler=scheduler)
    assert report.outcome is ga.Outcome.SKIPPED_EMPTY
    assert report.optimizer_step == report.weight == 0
    assert optimizer.gradients == []
    assert scheduler.last_epoch == 0
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def deep_loss(model, micro):
    return ga.Loss.of(model(micro).square())


@both_doors
def test_saved_tensors_are_those_of_one_micro_batch(door):
    """W13, torchtune PR#1917: saved bytes alive at N = 8 equal those at N = 1."""
    model = nn.Sequential(*[nn.Linear(16, 16), nn.Tanh()] * 4)
    peaks = []
    for num in (1, 8):
        saved = SavedTensors()
        with saved:
            update(door, [torch.ones(4, 16)] * num, model=model, loss=deep_loss)
        peaks.append(saved.peak)
        assert saved.bytes == 0
    assert peaks[0] == peaks[1] > 0


@both_doors
def test_nothing_of_a_micro_batch_outlives_it(door):
    """W13, torchtune PR#1917: its inputs and its loss are gone when the next begins."""
    model = Slope()
    alive: list[weakref.ref] = []
    gone = []

    def loss(model, rows):
        gone.append([ref() is None for ref in alive])
        found = summed(model, rows)
        alive.extend([weakref.ref(rows), weakref.ref(found.sum)])
        return found

    if door == "step":
        accumulator = ga.accumulator(
            model,
            Recorder(model.parameters()),
            loss,
            micro_batch_size=1,
            collate=lambda samples: tokens(*samples),
            verify="never",
        )
        accumulator.step([1.0, 2.0, 3.0, 4.0])
    else:
        accumulator = ga.accumulator(model, Recorder(model.parameters()))
        for rows in accumulator.over((tokens(1.0) for _ in range(4)), steps=4):
            accumulator.backward(loss(model, rows))
    assert gone == [[True] * 2 * k for k in range(4)]


@both_doors
def test_gradients_are_scaled_once_at_the_end(door):
    """W14, torchtitan#1733: two rounds of four quarters sum to 2.0 (1.25 if rescaled between)."""
    model = Slope(start=1.0)
    seen = []

    def quarter(model, rows):
        seen.append(0.0 if model.w.grad is None else model.w.grad.item())
        return ga.Loss(model(rows).sum() / 4, 1 / 8)

    gradient, _ = update(door, [tokens(1.0)] * 8, model=model, loss=quarter)
    assert seen == [k / 4 for k in range(8)]
    assert gradient.tolist() == [2.0]  # the eight weights add up to 1


@both_doors
@pytest.mark.parametrize(
    "unweighed", [lambda total: total, lambda total: (total, 3), lambda total: {"main": total}]
)
def test_a_loss_without_a_weight_is_an_error(door, unweighed):
    """W15, verl PR#5366: never a fall-back to the micro-batch's own count."""
    model = Slope()
    optimizer = Recorder(model.parameters())

    def loss(model, rows):
        return unweighed(model(rows).sum())

    with pytest.raises(TypeError, match="expected"):
        train(door, model, optimizer, loss, [[tokens(1.0)]])
    assert optimizer.gradients == []
    assert model.w.grad is None
