import numpy as np
import pytest
import torch

from gradaccum.errors import LossError
from gradaccum.loss import Loss, checked_terms
from gradaccum.loss.value import checked

ONE = torch.tensor(1.0)


def test_two_losses_are_not_made_one():
    with pytest.raises(LossError, match="Return a mapping"):
        Loss(torch.tensor(10.0), 1) + Loss(torch.tensor(8.0), 9)


def test_a_factor_scales_the_loss_and_not_its_weight():
    for scaled in (0.5 * Loss(ONE, 4), Loss(ONE, 4) * 0.5):
        assert (scaled.sum.item(), scaled.weight) == (0.5, 4)


def test_of_elementwise_losses():
    values = torch.tensor([[1.0, 2.0], [4.0, float("nan")]], requires_grad=True)
    assert Loss.of(values.detach()[0]) == Loss(torch.tensor(3.0), 2)
    weights = torch.tensor([[0.5, 1.0], [2.0, 0.0]], requires_grad=True)
    loss = Loss.of(values, weights)
    assert (loss.sum.item(), loss.weight.item()) == (0.5 + 2 + 8, 3.5)
    assert not loss.weight.requires_grad
    loss.sum.backward()
    assert values.grad.tolist() == [[0.5, 1.0], [2.0, 0.0]]  # finite where nothing counts


def test_of_unequal_shapes():
    with pytest.raises(LossError, match=r"\(2, 1\) for values of \(2, 3\)"):
        Loss.of(torch.ones(2, 3), torch.ones(2, 1))


@pytest.mark.parametrize(
    "weight", [0, 1, 2.5, True, np.int64(3), np.float32(0.5), torch.tensor(2), torch.tensor(0.5)]
)
def test_weights_that_are_one_number(weight):
    loss = Loss(ONE, weight)
    assert checked(loss, call="f") is loss


@pytest.mark.parametrize(
    "weight",
    [-1, float("nan"), float("inf"), None, "3", 1j, torch.tensor(-1), torch.ones(2), np.ones(2)],
)
def test_weights_that_are_not(weight):
    with pytest.raises(LossError, match=r"f\(m\) -> Loss\(weight="):
        checked(Loss(ONE, weight), call="f(m)")


@pytest.mark.parametrize("sum", [1.0, None, torch.ones(3), torch.ones(1), torch.tensor(3)])
def test_sums_that_are_no_floating_point_scalar(sum):
    with pytest.raises(LossError, match=r"f\(m\) -> Loss\(sum="):
        checked(Loss(sum, 1), call="f(m)")


@pytest.mark.parametrize("loss", [ONE, 1.0, None, (ONE, 3)])
def test_what_is_no_loss(loss):
    with pytest.raises(LossError, match=r"f\(m\): expected a gradaccum.Loss") as caught:
        checked_terms(loss, call="f(m)")
    assert "Loss(losses.sum(), weight=losses.numel())" in caught.value.remedy


def test_a_weight_on_an_accelerator_is_not_looked_at():
    sum, weight = torch.ones((), device="meta"), torch.ones((), device="meta")
    assert checked(Loss(sum, weight), call="f").weight.device.type == "meta"


def test_terms_by_name():
    loss = Loss(ONE, 1)
    assert checked_terms(loss, call="f") == {"": loss}
    assert checked_terms({"a": loss, 3: loss}, call="f") == {"a": loss, "3": loss}
    with pytest.raises(LossError, match="empty mapping"):
        checked_terms({}, call="f")
    with pytest.raises(LossError, match=r"f\['b'\]"):
        checked_terms({"a": loss, "b": ONE}, call="f")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_weights_of_16_bits_are_summed_wider(dtype):
    values = torch.full((70_001,), 2.0, dtype=dtype, requires_grad=True)
    mask = torch.ones(70_001, dtype=dtype)
    mask[0] = 0
    loss = Loss.of(values, mask)
    assert (loss.sum.item(), loss.weight.item()) == (140_000, 70_000)
    assert Loss.of(values).sum.item() == 140_002
    loss.sum.backward()
    assert torch.equal(values.grad, mask)
