"""Predicted without running, against measured: bytes of real models."""

from functools import partial

import numpy as np
import pytest
import torch
import transformers
from helpers.gpts import causal, chunked, gpt
from torch import nn

import gradaccum as ga
from gradaccum.batch import default_length
from gradaccum.collate import collate_function
from gradaccum.errors import PredictionError
from gradaccum.fake_trial import FakeTrial
from gradaccum.feed import Feed
from gradaccum.integrations.transformers import masks_as_in_earnest
from gradaccum.levers import Levers, checkpoint_blocks
from gradaccum.memory import LiveBytes
from gradaccum.prepared import Prepared

LENGTHS = [40, 8, 12, 33, 9, 25, 40, 16]


def bert():
    config = transformers.BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config).train()


def masked(model, micro):
    logits = model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits
    return ga.losses.cross_entropy(logits, micro["labels"])


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config).train()


def pictures(model, micro):
    return ga.losses.cross_entropy(model(micro["x"]).logits, micro["y"])


def text():
    ids = [torch.randint(1, 120, (length,)) for length in LENGTHS]
    return [
        {"input_ids": one, "labels": one, "attention_mask": torch.ones_like(one)} for one in ids
    ]


def images():
    return [{"x": torch.randn(3, 32, 32), "y": k % 3} for k in range(8)]


CASES = {
    "gpt": (gpt, causal, text, Levers()),
    "gpt with dropout": (lambda: gpt(dropout=0.1), causal, text, Levers()),
    "gpt, chunked": (gpt, chunked, text, Levers(chunked_loss=True)),
    "gpt, checkpointed": (gpt, causal, text, Levers(checkpointing=True)),
    "bert": (bert, masked, text, Levers()),
    "bert, checkpointed": (bert, masked, text, Levers(checkpointing=True)),
    "resnet": (resnet, pictures, images, Levers()),
    "resnet, checkpointed": (resnet, pictures, images, Levers(checkpointing=True)),
}


def feed_for(samples):
    pad = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return Feed(collate=collate_function(pad if "x" not in samples[0] else None))


def measured(model, optimizer, loss, micro):
    """Return the peak of the second of two equal micro-batches, inputs twice, above the rest."""
    for _ in range(2):
        meter = LiveBytes()
        sums = [p.grad for p in model.parameters() if p.grad is not None]
        meter.follow([*model.parameters(), *model.buffers(), *sums])
        rest = meter.live
        meter.follow(leaf for leaf in micro.values())
        inputs = meter.live - rest
        with meter:
            loss(model, micro).sum.backward()
    model.zero_grad()
    return meter.peak - rest + inputs


def in_wide_sums(model, micro, *, loss):
    """Run a micro-batch whose gradients are summed in float32, as the accumulator has them."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad_dtype = torch.float32
    return loss(model, micro)


TYPED = [(name, torch.float32) for name in CASES]
TYPED += [(name, torch.bfloat16) for name, (build, *_) in CASES.items() if build is not resnet]


@pytest.mark.parametrize(("case", "dtype"), TYPED)
def test_predicted_as_measured(case, dtype):
    build, loss, samples, levers = CASES[case]
    torch.manual_seed(0)
    model, samples = build().to(dtype), samples()
    if dtype == torch.bfloat16:
        loss = partial(in_wide_sums, loss=loss)
    optimizer = torch.optim.AdamW(model.parameters())
    feed, prepared = feed_for(samples), Prepared.of(samples, default_length)
    trial = FakeTrial(
        model=model,
        optimizers=[optimizer],
        loss=loss,
        feed=feed,
        prepared=prepared,
        levers=levers,
    )
    shapes = [[1, 4], [0, 6], [3], [0, 1, 2, 3, 4, 5, 6, 7], [2, 5, 7]]
    with masks_as_in_earnest(), trial.opened():
        predicted = [trial.probe(np.array(positions)) for positions in shapes]
    assert all(p.grad is None for p in model.parameters())
    if levers.checkpointing:
        checkpoint_blocks(model)
    for positions, probe in zip(shapes, predicted, strict=True):
        micro = feed.peek(prepared.samples, positions)
        peak = measured(model, optimizer, loss, micro)
        # Samples of equal length need no attention mask, at which fake tensors cannot look.
        equal = len({LENGTHS[k] for k in positions}) == 1 and build is bert
        assert probe.peak == pytest.approx(peak, rel=0.2 if equal else 1e-3)
        assert probe.peak >= peak
        assert probe.count == len(positions)
        assert probe.timeline.max() == probe.peak
        assert 0 < probe.kept <= probe.peak


def test_work_is_counted_and_recomputation_with_it():
    samples = text()
    flops = {}
    for levers in (Levers(), Levers(checkpointing=True), Levers(chunked_loss=True)):
        model = gpt()
        trial = FakeTrial(
            model=model,
            optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
            loss=chunked if levers.chunked_loss else causal,
            feed=feed_for(samples),
            prepared=Prepared.of(samples, default_length),
            levers=levers,
        )
        with masks_as_in_earnest(), trial.opened():
            trial.probe(np.arange(8))
        (work,) = trial.work
        flops[str(levers)] = work.flops
        assert (work.count, work.length) == (8, 40)
    block, head = 12 * 32**2, 32 * 120  # weights of a block and of the head
    attention = 3 * 8 * 2 * 3.5 * 4 * 40**2 * 16  # its backward costs two and a half forwards
    expected = 6 * 8 * 40 * (3 * block + head) + attention / 2
    assert flops["none"] == pytest.approx(expected, rel=0.35)
    assert 1.15 < flops["checkpointing"] / flops["none"] < 1.35
    assert flops["chunked loss"] == pytest.approx(flops["none"], rel=0.01)


def test_parked_tensors_leave_the_device():
    samples = text()
    kept = []
    for parking in (False, True):
        model = gpt()
        trial = FakeTrial(
            model=model,
            optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
            loss=causal,
            feed=feed_for(samples),
            prepared=Prepared.of(samples, default_length),
            levers=Levers(parking=parking),
        )
        with masks_as_in_earnest(), trial.opened():
            kept.append(trial.probe(np.arange(8)).kept)
    inputs = 8 * 40 * 8 * 3 * 2
    assert kept[1] - inputs < 0.3 * (kept[0] - inputs)


def test_nothing_real_is_touched():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.layer(nn.functional.dropout(self.norm(x)))

    model = Looks()
    samples = [(torch.randn(3),) for _ in range(6)]
    optimizer = torch.optim.Adam(model.parameters())
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()

    def trial(loss):
        return FakeTrial(
            model=model,
            optimizers=[optimizer],
            loss=loss,
            feed=Feed(),
            prepared=Prepared.of(samples, default_length),
        )

    fine = trial(lambda model, micro: ga.Loss(model(micro[0]).sum(), len(micro[0])))
    with fine.opened():
        fine.needs()
        fine.probe(np.arange(3))
    looking = trial(lambda model, micro: ga.Loss(model(micro[0]).sum() * micro[0].max().item(), 1))
    with pytest.raises(PredictionError, match="shapes alone"), looking.opened():
        looking.probe(np.arange(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers())))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
