import doctest

import pytest

from gradaccum import units


def test_each_function_shows_what_it_does():
    found = doctest.DocTestFinder().find(units)
    shown = {test.name.rpartition(".")[2] for test in found if test.examples}
    assert shown >= {"count", "duration", "share"}
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0"), (99_999, "99,999"), (1e5, "100K"), (1e6, "1M"), (2.5e9, "2.5G")]
)
def test_count_at_its_borders(number, told):
    assert units.count(number) == told


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0.00 s"), (10, "10.0 s"), (60, "1:00"), (3_600, "1:00:00")]
)
def test_duration_at_its_borders(seconds, told):
    assert units.duration(seconds) == told
