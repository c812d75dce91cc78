"""Against the mean reductions of torch.nn.functional, in float64."""

import pytest
import torch
from helpers.training import exactly
from torch.nn import functional

from gradaccum.errors import LossError
from gradaccum.loss import losses


def data(*shape, classes=5, ignored=0.3, ignore_index=-100):
    generator = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(*shape, classes, dtype=torch.float64, generator=generator)
    labels = torch.randint(classes, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = ignore_index
    return logits, labels


@pytest.mark.parametrize("shape", [(9,), (4, 6), (2, 3, 4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_cross_entropy_by_token(shape, smoothing, ignore_index):
    logits, labels = data(*shape, ignore_index=ignore_index)
    options = {"label_smoothing": smoothing, "ignore_index": ignore_index}
    loss = losses.cross_entropy(logits, labels, **options)
    mean = functional.cross_entropy(logits.movedim(-1, 1), labels, **options)
    assert loss.mean().item() == exactly(mean.item())
    assert loss.weight == (labels != ignore_index).sum()


@pytest.mark.parametrize("shape", [(9,), (4, 6), (2, 3, 4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_by_sequence(shape, smoothing):
    logits, labels = data(*shape)
    labels[1] = -100  # a sample without a label
    rows = [k for k in range(len(labels)) if (labels[k] != -100).any()]
    means = [
        functional.cross_entropy(
            logits[k].reshape(-1, 5), labels[k].reshape(-1), label_smoothing=smoothing
        )
        for k in rows
    ]
    loss = losses.cross_entropy(logits, labels, per="sequence", label_smoothing=smoothing)
    assert loss.mean().item() == exactly(torch.stack(means).mean().item())
    assert loss.weight == len(rows)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_causal_cross_entropy_predicts_the_next_label(per):
    logits, labels = data(3, 7)
    shifted = losses.cross_entropy(logits[:, :-1], labels[:, 1:], per=per, label_smoothing=0.1)
    loss = losses.causal_cross_entropy(logits, labels, per=per, label_smoothing=0.1)
    assert loss.sum.item() == exactly(shifted.sum.item())
    assert loss.weight == shifted.weight


@pytest.mark.parametrize("ignored", [0.0, 1.0])
def test_causal_cross_entropy_of_any_count_of_labels(ignored):
    logits, labels = data(3, 7, ignored=ignored)
    loss = losses.causal_cross_entropy(logits.requires_grad_(), labels)
    assert loss.weight == (0 if ignored else 3 * 6)
    loss.sum.backward()
    assert logits.grad.isfinite().all()


def test_one_label_a_sample_counts_the_same_by_token_and_by_sequence():
    logits, labels = data(9)
    one, other = (losses.cross_entropy(logits, labels, per=per) for per in ("token", "sequence"))
    assert (one.sum.item(), int(one.weight)) == (exactly(other.sum.item()), int(other.weight))


def test_shapes_that_do_not_fit():
    with pytest.raises(LossError, match=r"logits \(2, 5, 3\) and labels \(2, 3\)"):
        losses.cross_entropy(torch.ones(2, 5, 3), torch.ones(2, 3, dtype=int))
    with pytest.raises(LossError, match="per='word'"):
        losses.cross_entropy(*data(2, 3), per="word")


def pairs():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 3, dtype=torch.float64, generator=generator)
    return x, y.sigmoid(), torch.rand(4, 3, dtype=torch.float64, generator=generator).round()


@pytest.mark.parametrize("name", ["mse_loss", "binary_cross_entropy_with_logits"])
def test_elementwise_losses(name):
    x, y, weights = pairs()
    ours, theirs = getattr(losses, name), getattr(functional, name)
    assert ours(x, y).mean().item() == exactly(theirs(x, y).item())
    assert ours(x, y).weight == 12
    kept = weights.bool()
    assert 0 < kept.sum() < 12
    assert ours(x, y, weights=weights).mean().item() == exactly(theirs(x[kept], y[kept]).item())


def test_yes_or_no_labels_may_be_integers():
    x = torch.zeros(2, 3)
    assert losses.binary_cross_entropy_with_logits(x, x.long()).weight == 6


@pytest.mark.parametrize("name", ["mse_loss", "binary_cross_entropy_with_logits"])
def test_nothing_is_broadcast(name):
    with pytest.raises((LossError, ValueError), match=r"(?i)torch.Size\(\[3\]\)|\(3,\)"):
        getattr(losses, name)(torch.ones(3, 1), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_in_chunks_is_the_head(dtype, bias):
    """600 labels, so that there are three chunks, the last one short; a third carry no loss."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 200, 8, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(8, 50, bias=bias, dtype=dtype)
    labels = torch.randint(0, 50, (3, 200))
    labels[torch.rand(3, 200) < 0.3] = -100
    inputs = [hidden, *head.parameters()]
    exact = dtype == torch.float64
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 1e-5, "atol": 1e-4}
    pairs = (
        (losses.cross_entropy, losses.linear_cross_entropy),
        (losses.causal_cross_entropy, losses.causal_linear_cross_entropy),
    )
    for plain, chunked in pairs:
        expected = plain(head(hidden), labels)
        found = chunked(hidden, head.weight, labels, bias=head.bias)
        torch.testing.assert_close(found.sum, expected.sum, **tolerance)
        assert found.weight == expected.weight
        one = torch.autograd.grad(3 * expected.sum, inputs)
        two = torch.autograd.grad(3 * found.sum, inputs)
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, **tolerance)
        with torch.no_grad():
            again = chunked(hidden, head.weight, labels, bias=head.bias)
        torch.testing.assert_close(again.sum, expected.sum.detach(), **tolerance)


def test_a_head_in_chunks_without_a_label():
    hidden, head = torch.randn(2, 3, 4, requires_grad=True), torch.nn.Linear(4, 5, bias=False)
    found = losses.linear_cross_entropy(hidden, head.weight, torch.full((2, 3), -100))
    assert (float(found.sum.detach()), float(found.weight)) == (0.0, 0.0)
    found.sum.backward()
    assert hidden.grad.abs().sum() == 0


@pytest.mark.parametrize(
    "shapes", [((2, 3, 4), (5, 4), (2, 2)), ((2, 3, 4), (4, 5), (2, 3)), ((6, 4), (5, 4), (2, 3))]
)
def test_a_head_in_chunks_that_does_not_fit(shapes):
    hidden, weight, labels = shapes
    with pytest.raises(LossError, match=r"hidden \(..., dim\)"):
        losses.linear_cross_entropy(
            torch.zeros(hidden), torch.zeros(weight), torch.zeros(labels, dtype=torch.long)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_losses_of_16_bits_are_summed_wider(dtype, per):
    """A sum in bfloat16 has three digits; one in float16 ends at 65,504."""
    rng = torch.Generator().manual_seed(4)
    logits = (torch.randn(40, 300, 9, generator=rng) * 9).to(dtype).requires_grad_()
    labels = torch.randint(9, (40, 300), generator=rng)
    labels[:, 200:] = -100
    found = losses.cross_entropy(logits, labels, per=per)
    wide = logits.detach().double().requires_grad_()
    exact = losses.cross_entropy(wide, labels, per=per)
    assert found.sum.dtype == torch.float32
    assert found.sum.item() == pytest.approx(exact.sum.item(), rel=2e-4)
    assert found.weight == exact.weight
    found.sum.backward()
    exact.sum.backward()
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=2e-2, atol=1e-2)
