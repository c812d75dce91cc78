import numpy as np
import pytest

from gradaccum.errors import ArgumentError, SampleTooLargeError
from gradaccum.partition import Cap, CappedCut, Cost, FixedCut


def test_fixed():
    cut = FixedCut(size=2)
    assert [p.tolist() for p in cut(3, None)] == [[0, 1], [2]]
    assert [p.tolist() for p in cut(3, np.array([1, 2, 3]))] == [[2, 1], [0]]
    cut.admit(np.array([10**9]))
    with pytest.raises(ArgumentError, match="micro_batch_size"):
        FixedCut(size=0)


def test_capped():
    lengths = np.array([1, 5, 5])
    for fixed, parts in ((0, 2), (100, 1)):
        cut = CappedCut(cap=Cap(limit=15), cost=Cost(fixed=fixed))
        assert len(cut(3, lengths)) == parts
    with pytest.raises(SampleTooLargeError, match="sample 7"):
        cut(1, np.array([16]), indices=np.array([7]))
    with pytest.raises(SampleTooLargeError, match="sample 1"):
        cut.admit(np.array([1, 16]))
    with pytest.raises(ArgumentError, match=r"micro_batch_tokens=15.* without a length"):
        cut(3, None)
