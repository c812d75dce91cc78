"""A recipe trains one loss, or several objectives by name."""

import pytest
import torch

import gradaccum as ga
from gradaccum.errors import ArgumentError
from gradaccum.recipes.objective import Objective
from gradaccum.recipes.recipe import Recipe


def loss(model, rows):
    return ga.Loss(model(rows).sum(), len(rows))


MODEL = torch.nn.Linear(2, 1)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def objective(name):
    return Objective(name=name, loss=loss, optimizer=SGD)


def recipe(**parts):
    return Recipe(model=MODEL, train=[], **parts)


def test_one_loss_is_one_objective_without_a_name():
    weigh, chunked = (lambda sample: {"": 1.0}), (lambda model, micro: None)
    made = recipe(loss=loss, optimizer=SGD, chunked_loss=chunked, weigh=weigh)
    (one,) = made.trained
    assert one == Objective(loss=loss, optimizer=SGD, chunked_loss=chunked, weigh=weigh)
    assert one.name == ""


def test_objectives_take_the_place_of_the_loss():
    made = recipe(loss=loss, optimizer=SGD, baseline=("none", 1.0))
    other = made.with_objectives([objective("")])
    assert other.trained == (objective(""),)
    assert other.baseline == ("none", 1.0)
    assert other.loss is None


def score():
    return 0.0


BAD = {
    "nothing": ({}, "got neither"),
    "no optimizer": ({"loss": loss}, "got one of the two"),
    "both": ({"loss": loss, "objectives": [objective("a")]}, "got both"),
    "a weigh of nothing": ({"weigh": len, "objectives": [objective("a")]}, "got both"),
    "one name": (
        {"objectives": [objective("a"), objective("a")], "score": ("score", score)},
        "of one name: 'a', 'a'",
    ),
    "no score": ({"objectives": [objective("a"), objective("b")]}, "without a score="),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_trained_is_told_once(name):
    parts, expected = BAD[name]
    with pytest.raises(ArgumentError) as raised:
        recipe(**parts)
    assert expected in str(raised.value)
