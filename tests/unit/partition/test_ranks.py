from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.partition import deal

LENGTHS = st.lists(st.integers(1, 500), max_size=40)


@given(LENGTHS, st.integers(1, 9))
def test_each_sample_goes_to_one_rank_and_none_has_much_more_than_another(lengths, ranks):
    dealt = deal(len(lengths), np.asarray(lengths, dtype=np.int64), ranks)
    assert len(dealt) == ranks
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(lengths)))
    assert all((np.diff(positions) > 0).all() for positions in dealt)
    loads = [sum(lengths[k] for k in positions) for positions in dealt]
    if lengths:
        best = max(*lengths, sum(lengths) / ranks)  # no deal is better than this
        assert max(loads) <= sum(lengths) / ranks + max(lengths) <= 2 * best
        assert max(loads) - min(loads) <= max(lengths)


@given(st.integers(0, 30), st.integers(1, 9))
def test_samples_without_lengths_are_dealt_evenly(count, ranks):
    sizes = [len(positions) for positions in deal(count, None, ranks)]
    assert sum(sizes) == count
    assert max(sizes) == ceil(count / ranks)
    assert min(sizes) == count // ranks


def test_known_deals():
    lengths = np.array([4, 9, 5, 5, 3])
    assert [p.tolist() for p in deal(5, lengths, 2)] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize("ranks", [2, 5])
def test_all_ranks_find_the_same(ranks):
    lengths = np.full(11, 7)
    first, again = deal(11, lengths, ranks), deal(11, lengths.copy(), ranks)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
