"""Micro-batches that are tried before the first step, and what is predicted from them."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from helpers.failures import FailAt
from torch import nn

import gradaccum as ga
from gradaccum import probing, sizing
from gradaccum.collate import collate_function
from gradaccum.errors import ArgumentError, PhaseError, SampleTooLargeError
from gradaccum.feed import Feed
from gradaccum.memory import LiveBytes, fit
from gradaccum.partition import FixedCut
from gradaccum.trial import EngineTrial
from gradaccum.update import Update

PAD = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=256)
    return GPT2LMHeadModel(config)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
        attn_implementation="eager",
    )
    return BertForMaskedLM(config)


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
    return ResNetForImageClassification(config)


def causal(model, micro):
    logits = model(micro["input_ids"], attention_mask=micro["attention_mask"]).logits
    return ga.losses.causal_cross_entropy(logits, micro["labels"])


def masked(model, micro):
    logits = model(micro["input_ids"], attention_mask=micro["attention_mask"]).logits
    return ga.losses.cross_entropy(logits, micro["labels"])


def classes(model, micro):
    return ga.losses.cross_entropy(model(micro["pixels"]).logits, micro["labels"])


def texts(lengths):
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 100, (int(length),), generator=draw) for length in lengths]
    return [dict.fromkeys(("input_ids", "labels"), t) | {"attention_mask": t > 0} for t in ids]


def images(count):
    return [{"pixels": torch.zeros(3, 32, 32), "labels": k % 5} for k in range(count)]


def uneven(count, seed=0):
    draw = np.random.default_rng(seed)
    return np.minimum(draw.lognormal(3.2, 0.7, count).astype(int) + 2, 200)


def build(model, loss, memory, **options):
    torch.manual_seed(0)
    model = model()
    options = {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3), "pad": PAD, **options}
    optimizer = options.pop("optimizer")
    options = {"verify": "never", **options}
    return model, optimizer, ga.accumulator(model, optimizer, loss, memory=memory, **options)


def peak_of(model, optimizer, run):
    """Return the most bytes that were alive while something ran."""
    held = [t for one in optimizer.state.values() for t in one.values() if torch.is_tensor(t)]
    meter = LiveBytes()
    meter.follow([*model.parameters(), *model.buffers(), *held])
    with meter:
        run()
    return meter.peak


TEXT_SHAPES = [(1, 3), (1, 40), (1, 200), (2, 150), (5, 30), (20, 12), (30, 60)]
CASES = {
    "gpt": (gpt, causal, texts(uneven(48)), TEXT_SHAPES),
    "bert": (bert, masked, texts(uneven(48)), TEXT_SHAPES),
    "resnet": (resnet, classes, images(48), [(n, None) for n in (1, 2, 3, 7, 20, 33)]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_predicted_peaks_are_those_that_are_measured(case, monkeypatch):
    """In steps of three equal micro-batches, with optimizer state, far beyond what was tried."""
    model, loss, first, shapes = case
    model, optimizer, accumulator = build(model, loss, "6MiB")
    found = []
    monkeypatch.setattr(
        probing, "fit", lambda *a, **told: found.append(fit(*a, **told)) or found[-1]
    )
    accumulator.step(first)
    for count, length in shapes:
        batch = images(3 * count) if length is None else texts([length] * 3 * count)
        told = ga.accumulator(
            model, optimizer, loss, pad=PAD, micro_batch_size=count, verify="never"
        )
        measured = peak_of(model, optimizer, lambda told=told, batch=batch: told.step(batch))
        assert found[-1].predicted(count, length or 1) == pytest.approx(measured, rel=0.001)
        assert told.report.micro_batches == 3


@pytest.mark.parametrize(("model", "loss", "mib"), [(gpt, causal, 6), (bert, masked, 4)])
def test_ten_steps_fill_the_budget_and_stay_below_it(model, loss, mib):
    budget = mib * 2**20
    model, optimizer, accumulator = build(model, loss, budget)
    shares = []
    for seed in range(10):
        batch = texts(uneven(120, seed))
        shares.append(
            peak_of(model, optimizer, lambda batch=batch: accumulator.step(batch)) / budget
        )
        assert accumulator.report.replays == 0
    assert max(shares) <= 1
    assert np.mean(shares) > 0.9


def test_rows_of_one_tensor_count_once():
    """Micro-batches are views of it where it is on the device already."""

    def loss(model, micro):
        return ga.Loss.of(model(micro[0]).square())

    x = torch.randn(4096, 64)
    budget = 2 * x.nbytes
    model, optimizer, accumulator = build(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), loss, budget
    )
    accumulator.step((x,))
    assert 0.9 * budget < peak_of(model, optimizer, lambda: accumulator.step((x,))) <= budget


class Model(nn.Module):
    """Has running means, dropout, a frozen layer, and a buffer that its forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.norm = nn.BatchNorm1d(8)
        self.still = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(8, 100)
        self.register_buffer("calls", torch.zeros(()))
        self.still.eval()
        self.embed.weight.requires_grad_(False)

    def forward(self, ids):
        self.calls = self.calls + 1
        hidden = self.still(self.norm(self.embed(ids).flatten(0, 1))).unflatten(0, ids.shape)
        return self.out(self.dropout(hidden).tanh())


def noisy(model, micro):
    found = ga.losses.causal_cross_entropy(model(micro["input_ids"]), micro["labels"])
    return ga.Loss(found.sum * (1 + random.random() * np.random.rand()), found.weight)


def state(model, optimizer, accumulator):
    tensors = [t.clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())]
    return [tensor.tolist() for tensor in tensors], (
        [id(buffer) for buffer in model.buffers()],
        [p.grad for p in model.parameters()],
        [module.training for module in model.modules()],
        random.getstate(),
        str(np.random.get_state()),
        dict(optimizer.state),
        accumulator.counters,
        accumulator.phase,
        accumulator.report,
        torch.is_grad_enabled(),
    )


@pytest.fixture
def sized(monkeypatch):
    """Note the state before micro-batches are tried and after, whatever happens between."""
    seen = []

    class Noting(sizing.UnderBudget):
        def __call__(self, num_samples, lengths, trial):
            before = state(*seen[0])
            try:
                return super().__call__(num_samples, lengths, trial)
            finally:
                seen.append((before, state(*seen[0])))

    monkeypatch.setattr("gradaccum.build.UnderBudget", Noting)
    return seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("full"), ValueError("a bug")])
def test_nothing_is_changed_by_trying(sized, error, training):
    made = build(Model, noisy, "1MiB")
    made[0].train(training)
    sized.append(made)
    with FailAt(None if error is None else 700, error) as mode, suppress(ValueError):
        made[2].step(texts(uneven(9)))
    assert mode.operations > 700
    _, (before, after) = sized
    assert before == after


def test_a_step_is_as_if_its_cut_had_been_told():
    batch = texts(uneven(40))
    model, optimizer, accumulator = build(Model, noisy, "1MiB")
    random.seed(3)
    np.random.seed(3)
    report = accumulator.step(batch)
    assert report.micro_batches > 1
    other = build(Model, noisy, "1MiB")
    whole = other[2]._whole
    whole._sizing = sizing.Told(accumulator.cut)
    random.seed(3)
    np.random.seed(3)
    again = other[2].step(batch)
    assert (report.loss, report.grad_norm) == (again.loss, again.grad_norm)
    expected = state(model, optimizer, accumulator)[0]
    assert expected == state(*other)[0]
    assert model.calls == report.micro_batches


def test_a_loop_of_ones_own_is_not_disturbed():
    model, _, accumulator = build(gpt, causal, "6MiB")
    batch = texts([9, 5, 7, 3])
    micro = {name: torch.stack([batch[0][name]] * 2) for name in batch[0]}
    for k, _ in enumerate(accumulator.over([micro] * 3, steps=3)):
        sums = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with pytest.raises(PhaseError, match="how much memory a micro-batch needs") as caught:
            accumulator.evaluate(batch)
        assert "before a loop of your own" in caught.value.remedy
        kept = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, sums, kept))
        assert len(kept) == len(sums)
        assert accumulator.counters.micro_steps == k
        accumulator.backward(causal(model, micro))
    assert accumulator.report.micro_batches == 3
    accumulator.evaluate(batch)  # now it may


OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("full"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
}


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_memory_runs_out_in_any_operation_of_a_trial(error, monkeypatch):
    """Also in the middle of a backward that has added to the sum that is watched."""
    batch = texts(uneven(12))
    mode, ends = FailAt(), []

    class Failing(EngineTrial):
        def probe(self, positions, budget=None):
            with mode:
                found = super().probe(positions, budget)
            ends.append(mode.operations)
            return found

    monkeypatch.setattr("gradaccum.whole_batch.EngineTrial", Failing)

    def attempt(number):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(list(model.parameters())[::-1])
        accumulator = ga.accumulator(
            model, optimizer, noisy, memory="1MiB", pad=PAD, verify="never"
        )
        mode.__init__(number, error)
        accumulator.step(batch)
        return accumulator.cut.cap.size(9, 9)

    expected = attempt(None)
    first, last = ends[0], ends[-1]
    for number in range(first, last, 41):
        assert attempt(number) == pytest.approx(expected, rel=0.2)
    for number in range(0, first, 17):
        with pytest.raises(ArgumentError, match="room for one sample"):
            attempt(number)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_may_come_first(context):
    """Without gradients, in evaluation mode: a step is what is tried all the same."""
    batch = texts(uneven(30))
    shapes = [(1, 90), (7, 30), (40, 40)]
    expected = []
    for first in (False, True):
        model, _, accumulator = build(gpt, causal, "6MiB")
        if first:
            model.eval()
            with context():
                accumulator.evaluate(batch)
            assert not any(module.training for module in model.modules())
            model.train()
        accumulator.step(batch)
        expected.append([accumulator.cut.cap.size(*shape) for shape in shapes])
    assert expected[0] == expected[1]


def test_what_is_tried_is_stopped_at_the_budget():
    """A sample that is far longer than the others, of which nothing is known yet."""
    batch = texts([4, 4, 5, 5, 6, 200])
    budget = 2**20
    model, _, accumulator = build(gpt, causal, budget)
    meter = LiveBytes()
    meter.follow(model.parameters())
    with meter, pytest.raises(SampleTooLargeError, match="length 200"):
        accumulator.step(batch)
    state = 2 * sum(p.nbytes for p in model.parameters())  # AdamW's, which is to come
    assert budget < meter.peak + state < 1.1 * budget  # the sample needs four times as much


def test_several_are_tried_boldly_but_never_beyond_the_budget():
    """Where one fits and nothing is known of two: stopped before the operation that is too much."""
    batch = texts([150] * 6)
    _, _, accumulator = build(gpt, causal, "1GiB")
    accumulator.step(batch)
    alone = accumulator.cut.cap.size(1, 150)
    for share in (1.01, 1.2, 1.5, 1.9):
        budget = int(share * alone)
        model, _, accumulator = build(gpt, causal, budget)
        meter = LiveBytes()
        meter.follow(model.parameters())
        with meter:
            accumulator.evaluate(batch)
        state = 2 * sum(p.nbytes for p in model.parameters())  # AdamW's, which is to come
        assert meter.peak + state <= budget


def test_evaluating_first_leaves_gradients_of_a_loop_by_hand():
    model, _, accumulator = build(gpt, causal, "1GiB")
    (first, *_) = model.parameters()
    first.grad = torch.ones_like(first)
    accumulator.evaluate(texts([4, 9, 6]))
    assert torch.equal(first.grad, torch.ones_like(first))
    assert sum(p.grad is not None for p in model.parameters()) == 1


def test_a_trial_runs_as_an_effective_batch_does():
    """Terms have their weights, frozen is frozen."""
    seen = []

    def loss(model, micro):
        seen.append(model.still.training)
        found = noisy(model, micro)
        return {"ce": found, "more": ga.Loss(found.sum, len(micro["labels"]))}

    class Tried:
        def __call__(self, num_samples, lengths, trial):
            with trial.opened():
                assert trial.probe(np.arange(2)).count == 2
            assert seen == [False] * 2
            return FixedCut(size=num_samples)

    model = Model()
    accumulator = ga.Accumulator(
        model=model,
        update=Update(optimizers=(torch.optim.AdamW(model.parameters()),)),
        loss=loss,
        feed=Feed(collate=collate_function(PAD)),
        sizing=Tried(),
        weigh=lambda sample: {"ce": len(sample["labels"]) - 1, "more": 1},
    )
    report = accumulator.step(texts([9, 5, 7, 3]))
    assert report.terms.keys() == {"ce", "more"}
    assert seen[2:] == [False]
