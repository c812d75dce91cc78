import copy
import random
import warnings

import numpy as np
import pytest
import torch
from helpers.training import Recorder
from torch import nn
from torch.nn import functional

import gradaccum as ga
from gradaccum.audit import Verify
from gradaccum.batch import effective_batch
from gradaccum.errors import LossError


@pytest.fixture(autouse=True)
def seeded():
    """Weights that are drawn so near to zero that nothing shows would be no fault."""
    torch.manual_seed(0)


def squares(model, x):
    return ga.Loss.of(model(x).square())


def run(model, loss=squares, samples=6, size=2, **options):
    """Run one effective batch of random rows; return its report."""
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    accumulator = ga.accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=size, **options
    )
    return accumulator.step(x)


def told(model, loss=squares, **options):
    """Return the one warning that an effective batch gives."""
    with pytest.warns(ga.CutInvarianceWarning) as caught:
        run(model, loss, **options)
    assert len(caught) == 1
    return str(caught[0].message)


class Rows(nn.Module):
    """Rows as sequences of four tokens of two features."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.view(len(x), 4, 2))


class Attention(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=batch_first)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_batch_norm_is_named():
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"block": block})["block"])
    message = told(model)
    assert "Samples interact in 1.1 (BatchNorm1d)" in message
    assert "GroupNorm" in message


def test_attention_across_the_batch_is_named():
    message = told(Rows(Attention(batch_first=False)))
    assert "Samples interact in inner.attention (MultiheadAttention)" in message


def test_the_first_module_is_named():
    model = nn.Sequential(nn.Linear(8, 8), Centred(), nn.BatchNorm1d(8))
    assert "Samples interact in 1 (Centred)" in told(model)


class CentredLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_the_model_itself_is_named():
    assert "the model itself (CentredLinear)" in told(CentredLinear(8, 1))


def test_a_mean_in_place_of_a_sum():
    message = told(nn.Linear(8, 1), lambda model, x: ga.Loss(model(x).square().mean(), len(x)))
    assert "is 0.5 times" in message
    assert "return its sum" in message


def test_negatives_in_the_batch():
    def contrast(model, x):
        embedded = functional.normalize(model(x), dim=1)
        scores = embedded @ functional.normalize(x, dim=1).T
        return ga.losses.cross_entropy(scores, torch.arange(len(x)))

    message = told(nn.Linear(8, 8), contrast)
    assert "Samples interact in the loss function" in message


def test_a_weight_that_is_no_count():
    message = told(nn.Linear(8, 1), lambda model, x: ga.Loss(model(x).square().sum(), 1))
    assert "weight of the loss is 1 for 2 samples together and 2" in message


def test_a_term_is_named():
    def terms(model, x):
        good = squares(model, x)
        return {"good": good, "bad": ga.Loss(good.sum / len(x), len(x))}

    message = told(nn.Linear(8, 1), terms, weigh=lambda row: {"good": 1, "bad": 1})
    assert "summed loss 'bad'" in message


def test_a_loss_that_needs_two_samples():
    def spread(model, x):
        if len(x) < 2:
            raise ValueError("one sample has no spread")
        return squares(model, x)

    assert "one sample alone raises ValueError: one sample has no spread" in told(
        nn.Linear(8, 1), spread
    )


GOOD = {
    "linear": lambda: nn.Linear(8, 3),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
    "layer norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
    "group norm": lambda: Rows(nn.Sequential(nn.Conv1d(4, 6, 2), nn.GroupNorm(2, 6))),
    "batch norm in evaluation mode": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "attention": lambda: Rows(Attention(batch_first=True)),
    "bfloat16": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()).bfloat16(),
    "float64": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double(),
    "rnn": lambda: Rows(nn.GRU(2, 3, batch_first=True)),
}


@pytest.mark.parametrize("name", GOOD)
def test_no_warning_where_samples_leave_each_other_alone(name):
    torch.manual_seed(0)
    model = GOOD[name]()
    if name == "batch norm in evaluation mode":
        model[1].eval()
    dtype = next(model.parameters()).dtype

    def loss(model, x):
        out = model(x.to(dtype))
        return ga.Loss.of((out[0] if isinstance(out, tuple) else out).square())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, loss)


def test_no_warning_for_padding_that_is_masked():
    model = nn.Embedding(9, 9)
    samples = [{"input_ids": [1, 2, 3][:n] * 2} for n in (3, 1, 2, 3)]

    def loss(model, micro):
        return ga.losses.causal_cross_entropy(
            model(micro["input_ids"].clamp(min=0)), micro["input_ids"]
        )

    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        micro_batch_tokens=12,
        pad={"input_ids": -100},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.step(samples)


def test_a_loss_may_ask_for_gradients():
    def penalty(model, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ga.Loss.of((slope.norm(dim=1) - 1).square())

    assert run(nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)), penalty).outcome.stepped


class Stateful(nn.Module):
    """Buffers that are moved in place and replaced, random draws, and a mode by hand."""

    def __init__(self, norm):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = norm(8)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.seen = self.seen + 1
        random.random()
        np.random.rand()
        return self.frozen(self.dropout(self.norm(self.linear(x))))


@pytest.mark.parametrize(
    ("norm", "raising"), [(nn.BatchNorm1d, False), (nn.LayerNorm, False), (nn.LayerNorm, True)]
)
def test_everything_is_left_as_it_was(norm, raising):
    """The step with a check before it is bit for bit the step without."""
    results = []
    for verify in ("first", "never"):
        torch.manual_seed(4)
        random.seed(4)
        np.random.seed(4)
        model = Stateful(norm)
        looked = []

        def loss(model, x, looked=looked):
            looked.append((len(x), [p.grad is None for p in model.parameters()]))
            if raising and len(x) == 1:
                raise LossError("loss", expected="more", got="one", remedy="Pass more.")
            return squares(model, x)

        accumulator = ga.accumulator(
            model, Recorder(model.parameters()), loss, micro_batch_size=2, verify=verify
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accumulator.step(torch.randn(6, 8))
        assert all(all(none) for size, none in looked if size != 2)
        results.append(copy.deepcopy(model.state_dict()))
        results.append({"torch": torch.rand(1), "numpy": np.random.rand(), "py": random.random()})
        results.append([module.training for module in model.modules()])
    one, other = results[:3], results[3:]
    assert one[0]["seen"] == 3
    assert all(torch.equal(value, other[0][name]) for name, value in one[0].items())
    assert one[1:] == other[1:]


def test_no_gradient_and_no_hook_is_left():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    samples = effective_batch(torch.ones(4, 8))
    check = Verify(
        model=model, loss=squares, micro_batch=lambda batch, k: batch.micro_batch(np.array(k), None)
    )
    check(samples)
    assert all((p.grad == 3.0).all() for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("samples", "looks"), [(1, 0), (2, 1), (6, 1)])
def test_fewer_than_two_samples_say_nothing(samples, looks):
    model = nn.Sequential(nn.Linear(8, 8), Centred())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, samples=samples)
    assert len(caught) == looks


def test_once():
    sizes = []

    def loss(model, x):
        sizes.append(len(x))
        return squares(model, x)

    model = nn.Linear(8, 1)
    accumulator = ga.accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, micro_batch_size=2
    )
    for expected in (True, False):
        sizes.clear()
        accumulator.step(torch.ones(4, 8))
        assert (sizes != [2, 2]) == expected


def test_the_smallest_samples_are_looked_at():
    sizes = []

    def loss(model, micro):
        sizes.append(micro["input_ids"].shape)
        return ga.losses.cross_entropy(model(micro["input_ids"]), micro["input_ids"])

    model = nn.Embedding(9, 9)
    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        micro_batch_size=1,
        collate=lambda samples: {
            "input_ids": nn.utils.rnn.pad_sequence(
                [torch.tensor(s["input_ids"]) for s in samples], True, -100
            ).clamp(min=0)
        },
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator.step([{"input_ids": [1] * n} for n in (50, 3, 60, 2, 4, 70)])
    checked = [shape for shape in sizes if shape[0] == 2]
    assert checked
    assert all(shape[1] <= 3 for shape in checked)


def test_never_is_never():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, verify="never")


def text(*lengths):
    return [{"input_ids": torch.arange(1, n + 1)} for n in lengths]


def test_padding_that_is_scored_as_labels():
    def loss(model, micro):
        ids = micro["input_ids"]
        return ga.losses.cross_entropy(model(ids), ids)  # no label is ignored, padding included

    model = nn.Embedding(9, 9)
    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        micro_batch_size=2,
        pad={"input_ids": 0},
    )
    with pytest.warns(ga.CutInvarianceWarning, match="weight of the loss is 14 for 2 samples"):
        accumulator.step(text(3, 3, 3, 7, 6)[:4])


def test_no_warning_for_a_collate_function_that_draws():
    def noisy(samples):
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": torch.where(torch.rand(ids.shape) < 0.5, 0, ids)}

    def loss(model, micro):
        return ga.losses.cross_entropy(model(micro["input_ids"]), micro["input_ids"])

    model = nn.Embedding(9, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ga.accumulator(model, optimizer, loss, micro_batch_size=2, collate=noisy).step(text(6, 6, 6, 6))


@pytest.mark.parametrize("length", [4, 6, 7])
def test_no_warning_for_a_layer_with_the_batch_second(length):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(2, 3)

        def forward(self, x):
            return self.lstm(x.transpose(0, 1))[0].transpose(0, 1)

    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, x):
        return ga.Loss.of(model(x).square().sum((1, 2)))

    ga.accumulator(model, optimizer, loss, micro_batch_size=2).step(torch.randn(5, length, 2))


@pytest.mark.parametrize(
    ("total", "told_of"),
    [
        (lambda y: y.flatten().topk(3).values.sum(), "RuntimeError"),
        (lambda y: y.view(-1, 5).sum(1).square().sum(), "RuntimeError"),
        (lambda y: y.sum() + dict.fromkeys([5], 0)[len(y)], "KeyError"),
    ],
)
def test_a_loss_over_groups_still_trains(total, told_of):
    def loss(model, x):
        return ga.Loss(total(model(x)), len(x))

    message = told(nn.Linear(8, 1), loss, samples=10, size=5)
    assert "could not be seen on two" in message
    assert told_of in message
    assert 'verify="never"' in message


def test_no_warning_for_numbers_that_python_and_numpy_draw():
    def loss(model, x):
        factor = random.choice([0.5, 1.0]) * np.random.uniform(0.5, 1.5)
        return ga.Loss.of(model(x * factor).square())

    for seed in range(4):
        random.seed(seed)
        np.random.seed(seed)
        run(nn.Linear(8, 1), loss)
