import pytest

from gradaccum.errors import ArgumentError
from gradaccum.memory import Budget


@pytest.mark.parametrize(
    ("told", "bytes_"),
    [
        (1, 1),
        (12345, 12345),
        ("700MiB", 700 * 2**20),
        ("4 GiB", 4 * 2**30),
        (" 1.5gb ", 1_500_000_000),
        (".5KiB", 512),
        ("80", 80),
        ("3 B", 3),
    ],
)
def test_budgets_are_read(told, bytes_):
    assert Budget.of(told) == Budget(bytes=bytes_)
    assert Budget.of(Budget.of(told)) == Budget(bytes=bytes_)


@pytest.mark.parametrize(
    "told", [0, -1, "0GiB", "-4GiB", "12 bananas", "", "GiB", "1e9", "nan", True, 1.5, None, [4]]
)
def test_what_is_no_budget_gets_one_sentence(told):
    with pytest.raises(ArgumentError, match="expected a positive number of bytes") as caught:
        Budget.of(told)
    assert caught.value.call == f"memory={told!r}"
    assert caught.value.got == repr(told)
    assert "4GiB" in caught.value.remedy
