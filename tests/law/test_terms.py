"""Several terms with weights of their own: each is divided by its own total."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

import gradaccum as ga
from gradaccum.errors import LossError


def _samples(rng, count):
    """Each with a label count of its own for each of two terms, sometimes none."""
    return [
        {
            "x": torch.from_numpy(rng.normal(size=3)),
            "ce": torch.tensor(float(rng.integers(0, 4))),
            "aux": torch.tensor(float(rng.integers(0, 9))),
        }
        for _ in range(count)
    ]


def _loss(model, micro):
    out = model(micro["x"])
    return {
        "ce": ga.Loss((out[:, 0] ** 2 * micro["ce"]).sum(), micro["ce"].sum()),
        "aux": 0.1 * ga.Loss((out[:, 1].exp() * micro["aux"]).sum(), micro["aux"].sum()),
    }


def _weigh(sample):
    return {"ce": float(sample["ce"]), "aux": float(sample["aux"])}


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 6), count=st.integers(2, 9))
def test_terms_equal_the_full_batch(seed, size, count):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    samples = _samples(rng, count)
    samples[0] |= {"ce": torch.tensor(2.0), "aux": torch.tensor(5.0)}
    model = nn.Linear(3, 2).double()
    twin = deepcopy(model)

    ce = sum(s["ce"] * twin(s["x"])[0] ** 2 for s in samples) / sum(s["ce"] for s in samples)
    aux = sum(s["aux"] * twin(s["x"])[1].exp() for s in samples) / sum(s["aux"] for s in samples)
    mean = ce + 0.1 * aux
    mean.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in twin.parameters())).item()
    SGD(twin.parameters(), lr=1.0).step()

    accumulator = ga.accumulator(
        model, SGD(model.parameters(), lr=1.0), _loss, micro_batch_size=size, weigh=_weigh
    )
    report = accumulator.step(samples)
    assert report.loss == pytest.approx(mean.item(), rel=1e-10)
    assert report.terms["ce"].loss == pytest.approx(ce.item(), rel=1e-10)
    assert report.terms["aux"].loss == pytest.approx(0.1 * aux.item(), rel=1e-10)
    assert report.grad_norm == pytest.approx(norm, rel=1e-10)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


def test_terms_without_weights_beforehand_are_refused():
    model = nn.Linear(3, 2).double()
    before = deepcopy(model.state_dict())
    accumulator = ga.accumulator(
        model, SGD(model.parameters(), lr=1.0), _loss, micro_batch_size=2, verify="never"
    )
    with pytest.raises(LossError, match=r"terms aux, ce.*weigh="):
        accumulator.step(_samples(np.random.default_rng(0), 4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_weights_that_the_loss_does_not_hand_back_are_refused():
    model = nn.Linear(3, 2).double()
    accumulator = ga.accumulator(
        model,
        SGD(model.parameters(), lr=1.0),
        _loss,
        micro_batch_size=2,
        weigh=lambda sample: {"ce": 1.0, "aux": float(sample["aux"])},
    )
    with pytest.raises(LossError, match=r"weigh\(sample\)\['ce'\]"):
        accumulator.step(_samples(np.random.default_rng(0), 4))
