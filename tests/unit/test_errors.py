import copy
import pickle

import pytest

from gradaccum import errors

PARTS = {"expected": "one", "got": "two", "remedy": "Pass one."}
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]


@pytest.mark.parametrize("cls", CLASSES)
def test_four_parts(cls):
    error = cls("f(x=2)", **PARTS)
    assert str(error) == "f(x=2): expected one, got two. Pass one."
    assert isinstance(error, errors.GradaccumError)
    with pytest.raises(TypeError, match="remedy"):
        cls("f(x=2)", expected="one", got="two")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy])
def test_the_parts_cross_a_process_border(cls, copied):
    error = copied(cls("f(x=2)", **PARTS))
    assert type(error) is cls
    assert (error.call, error.expected, error.got, error.remedy) == ("f(x=2)", *PARTS.values())
    assert str(error) == "f(x=2): expected one, got two. Pass one."


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (errors.ArgumentError, ValueError),
        (errors.LossError, TypeError),
        (errors.CollateError, ValueError),
        (errors.SampleTooLargeError, ValueError),
        (errors.DataError, ValueError),
        (errors.NonFiniteError, ArithmeticError),
        (errors.PhaseError, RuntimeError),
    ],
)
def test_each_is_also_what_python_has_for_it(cls, base):
    assert issubclass(cls, base)
