import numpy as np
import pytest

from gradaccum.errors import ArgumentError
from gradaccum.partition import Partition, accumulation_steps, fixed, num_parts, require_positive


def test_counts_of_a_partition():
    plan = Partition(micro_batches=(np.array([2]), np.array([0, 1])), lengths=np.array([3, 5, 8]))
    assert (len(plan), plan.num_samples, plan.tokens) == (2, 3, 16)
    assert [plan.padded_length(k) for k in range(2)] == [8, 5]
    assert plan.padded_tokens == 8 + 2 * 5
    assert plan.real_share == 16 / 18


def test_unknown_lengths_count_as_none():
    plan = fixed(5, 2)
    assert (plan.tokens, plan.padded_tokens, plan.real_share) == (0, 0, 1.0)
    assert [len(positions) for positions in plan] == [2, 2, 1]


@pytest.mark.parametrize(
    ("total", "size", "keep", "drop"), [(5, 2, 3, 2), (4, 2, 2, 2), (1, 8, 1, 0), (0, 3, 0, 0)]
)
def test_parts(total, size, keep, drop):
    assert num_parts(total, size) == keep
    assert num_parts(total, size, last="drop") == drop


@pytest.mark.parametrize("name", ["effective_batch", "micro_batch_size", "world_size", "steps"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_accumulation_steps_of_whole_numbers(name, value):
    numbers = {"effective_batch": 8, "micro_batch_size": 2, "world_size": 1, "steps": 4}
    assert accumulation_steps(**numbers) == 4
    with pytest.raises(ArgumentError, match=f"accumulation_steps.*{name}"):
        accumulation_steps(**(numbers | {name: value}))


def test_whole_numbers_come_back_as_int():
    assert type(require_positive("size", np.int32(3))) is int
    with pytest.raises(ArgumentError, match=r"size=0: expected size .* got 0"):
        require_positive("size", 0)
