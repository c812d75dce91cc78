import weakref
from math import isnan

import pytest
import torch

from gradaccum.errors import LossError
from gradaccum.loss import Loss, Tally


def loss(sum, weight):
    return Loss(torch.tensor(sum, requires_grad=True), weight)


def alone(numbers):
    return numbers


def tallied(*micro_batches, weighed=None):
    tally = Tally(weighed)
    for terms in micro_batches:
        tally.add(terms)
    return tally


def test_the_mean_of_a_lone_term():
    tally = tallied({"": loss(10.0, 1)})
    assert tally.mean(alone)[0].loss == 10.0
    tally.add({"": loss(8.0, torch.tensor(9))})
    mean, beside = tally.mean(alone, torch.tensor([3.0, 5.0]))
    assert (mean.loss, mean.divisor, beside) == (1.8, 10.0, [3.0, 5.0])
    assert mean.terms == {}
    assert tally.mean(alone)[1] == []


def test_a_lone_named_term_is_told():
    mean, _ = tallied({"ce": loss(6.0, 3)}).mean(alone)
    assert (mean.terms["ce"].loss, mean.terms["ce"].weight, mean.divisor) == (2.0, 3.0, 3.0)


def test_several_terms_are_divided_as_they_come():
    tally = Tally(weighed={"ce": 10, "aux": 2})
    assert tally.differentiable({"ce": loss(5.0, 4)}).item() == 5 / 10
    total = tally.differentiable({"ce": loss(5.0, 4), "aux": loss(3.0, 1)})
    assert total.item() == 5 / 10 + 3 / 2
    tally.add({"ce": loss(5.0, 4), "aux": loss(3.0, 1)})
    tally.add({"ce": loss(1.0, 6)})
    tally.add({"aux": loss(1.0, 1)})  # a term may be absent from a micro-batch
    mean, _ = tally.mean(alone)
    assert (mean.loss, mean.divisor) == (pytest.approx(0.6 + 2.0), 1.0)
    assert mean.terms["aux"].weight == 2


def test_a_lone_term_is_not_divided():
    assert Tally().differentiable({"": loss(5.0, 4)}).item() == 5.0
    assert Tally(weighed={"": 4}).differentiable({"": loss(5.0, 4)}).item() == 5.0


def test_a_term_of_several_without_weight_adds_nothing():
    tally = Tally(weighed={"ce": 10, "aux": 0})
    terms = {"ce": loss(5.0, 10), "aux": loss(0.0, 0)}
    assert tally.differentiable(terms).item() == 0.5
    tally.add(terms)
    mean, _ = tally.mean(alone)
    assert (mean.loss, mean.divisor) == (0.5, 1.0)


def test_a_term_without_weight_may_be_left_out():
    tally = Tally({"ce": 10, "aux": 0})
    terms = {"ce": loss(5.0, 10)}
    assert tally.differentiable(terms).item() == 0.5  # divided already,
    tally.add(terms)
    assert tally.mean(alone)[0].divisor == 1.0  # so not once more


@pytest.mark.parametrize("weighed", [None, {"ce": 3.0}])
def test_several_terms_need_weights_beforehand(weighed):
    with pytest.raises(LossError, match="weigh=lambda") as caught:
        Tally(weighed=weighed).differentiable({"ce": loss(5.0, 4), "aux": loss(3.0, 1)})
    assert "aux" in caught.value.got
    with pytest.raises(LossError, match="aux"):  # also where they come one after the other
        tallied({"ce": loss(1.0, 1)}, weighed=weighed).differentiable({"aux": loss(3.0, 1)})


@pytest.mark.parametrize("weighed", [{"": 5}, {"": 0}, {"": 4, "aux": 1}, {"ce": 4}])
def test_weights_that_disagree(weighed):
    with pytest.raises(LossError, match="weigh"):
        tallied({"": loss(5.0, 4)}, weighed=weighed).mean(alone)


@pytest.mark.parametrize(
    "tally", [Tally(), tallied({"": loss(0.0, 0)}), Tally(weighed={"a": 0, "b": 0})]
)
def test_nothing_carries_weight(tally):
    mean, _ = tally.mean(alone)
    assert isnan(mean.loss)
    assert mean.divisor == 0


@pytest.mark.parametrize("weight", [float("nan"), -1.0])
def test_bad_weights_that_were_not_looked_at(weight):
    with pytest.raises(LossError, match="negative one or NaN"):
        tallied({"": loss(5.0, torch.tensor(weight))}).mean(alone)


def test_the_mean_is_over_all_ranks():
    handed = []

    def doubled(numbers):
        handed.append(numbers)
        return {name: 2 * number for name, number in numbers.items()}

    mean, beside = tallied({"": loss(5.0, 4)}).mean(doubled, torch.tensor([3.0]))
    assert handed == [{("sum", ""): 5.0, ("weight", ""): 4.0}]
    assert (mean.loss, mean.divisor, beside) == (1.25, 8.0, [3.0])


def test_no_addition_is_lost():
    small = {"": Loss(torch.tensor(1e-3, dtype=torch.bfloat16), 0)}
    tally = tallied({"": Loss(torch.tensor(1.0, dtype=torch.bfloat16), 1)}, *[small] * 1_000)
    exact = 1.0 + 1_000 * float(small[""].sum)
    assert tally.mean(alone)[0].loss == pytest.approx(exact, rel=1e-12)


def test_no_graph_is_held():
    kept = weakref.ref(graph := torch.ones(3, requires_grad=True).square())
    tally = tallied({"": Loss(graph.sum(), 1)})
    del graph
    assert kept() is None
    assert tally.mean(alone)[0].loss == 3.0
