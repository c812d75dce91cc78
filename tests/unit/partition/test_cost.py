import numpy as np
import pytest

from gradaccum.errors import ArgumentError
from gradaccum.partition import Cap, Cost


@pytest.mark.parametrize("name", ["fixed", "squared"])
@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_costs_are_finite_and_not_negative(name, value):
    with pytest.raises(ArgumentError, match=f"Cost\\({name}="):
        Cost(**{name: value})


@pytest.mark.parametrize("limit", [0, -5, float("inf"), float("nan")])
def test_caps_are_finite_and_positive(limit):
    with pytest.raises(ArgumentError, match="Cap"):
        Cap(limit=limit)


def test_cost_of_a_sample():
    assert Cost(squared=0.5).of_sample(np.array([2, 4])).tolist() == [4.0, 12.0]


@pytest.mark.parametrize("length", [1, 2, 7, 50, 101])
@pytest.mark.parametrize("available", [0, 1, 5, 1_000])
def test_as_many_as_fit(length, available):
    told = Cap(limit=100, size=lambda count, length: count * length)
    expected = max(n for n in range(available + 1) if n * length <= 100)
    assert told.most(length, available) == expected
    assert Cap(limit=100).most(length, available) == expected


def test_size_is_asked_for():
    assert Cap(limit=1).of(3, 4) == 12
    assert Cap(limit=1, size=lambda count, length: count + length).of(3, 4) == 7
