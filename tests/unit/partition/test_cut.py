"""The cut against a twin that tries every cut, O(n^2) in time and without its shortcuts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaccum.errors import ArgumentError, SampleTooLargeError
from gradaccum.partition import Cap, Cost, by_length, fixed, optimal
from gradaccum.partition.cut import admit, checked_lengths


def slow_twin(lengths, cap, cost):
    """Return the least cost of any cut of the sorted lengths under the cap."""
    descending = sorted(lengths, reverse=True)
    best = [0.0] + [float("inf")] * len(descending)
    for j in range(1, len(descending) + 1):
        for i in range(j):
            if cap.of(j - i, descending[i]) <= cap.limit:
                best[j] = min(best[j], best[i] + price(j - i, descending[i], cost))
    return best[-1]


def price(count, length, cost):
    return cost.fixed + count * (length + cost.squared * length**2)


def paid(plan, cost):
    return sum(price(len(p), plan.padded_length(k), cost) for k, p in enumerate(plan))


def rounded_up(count, length):
    return count * -(-length // 8) * 8


def quadratic(count, length):
    return count * (length + length**2 / 16)


@st.composite
def cuts(draw):
    most = draw(st.sampled_from([3, 12, 60]))  # few lengths, so that many are equal
    lengths = draw(st.lists(st.integers(1, most), max_size=40))
    size = draw(st.sampled_from([None, rounded_up, quadratic]))
    alone = Cap(limit=1, size=size).of(1, max(lengths, default=1))
    limit = alone * draw(st.floats(1, 6)) + draw(st.integers(0, 30))
    cost = Cost(fixed=draw(st.sampled_from([0, 0.3, 7, 48, 1e4])), squared=draw(st.floats(0, 0.5)))
    return lengths, Cap(limit=limit, size=size), cost


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_no_cut_is_cheaper(case):
    lengths, cap, cost = case
    plan = optimal(np.array(lengths, dtype=int), cap, cost=cost)
    assert paid(plan, cost) == pytest.approx(slow_twin(lengths, cap, cost), rel=1e-9)
    for k, positions in enumerate(plan):
        assert cap.of(len(positions), plan.padded_length(k)) <= cap.limit
    assert sorted(k for positions in plan for k in positions) == list(range(len(lengths)))
    padded = [plan.padded_length(k) for k in range(len(plan))]
    assert padded == sorted(padded, reverse=True)  # what needs most memory comes first


@pytest.mark.parametrize("lengths", [[], [0], [0] * 9, [5, 0, 0], [0, 3, 0, 3]])
def test_empty_samples_are_cut_too(lengths):
    plan = optimal(np.array(lengths, dtype=int), 6)
    assert sorted(k for positions in plan for k in positions) == list(range(len(lengths)))


@pytest.mark.parametrize(("limit", "counts"), [(8, [1, 1]), (15, [1, 1]), (16, [2])])
def test_a_number_as_cap_counts_padded_tokens(limit, counts):
    plan = optimal(np.array([3, 8]), limit)
    assert [len(positions) for positions in plan] == counts


@pytest.mark.parametrize(("cost", "parts"), [(0, 3), (1000, 1)])
def test_the_fixed_cost_decides_between_padding_and_passes(cost, parts):
    assert len(optimal(np.array([100, 50, 10]), 300, cost=Cost(fixed=cost))) == parts


def test_a_hundred_thousand_samples_at_once():
    lengths = np.random.default_rng(0).integers(1, 513, 100_000)
    plan = optimal(lengths, 8_192)
    assert plan.num_samples == 100_000
    assert plan.real_share > 0.999


def test_too_large_a_sample_is_named():
    lengths, indices = np.array([3, 1872, 7]), np.array([40, 41, 42])
    with pytest.raises(SampleTooLargeError) as caught:
        optimal(lengths, 1_000, indices=indices)
    told = str(caught.value)
    for part in ("sample 41", "length 1,872", "1,000 tokens", "1,872 tokens for this sample alone"):
        assert part in told
    with pytest.raises(SampleTooLargeError, match="sample 1 "):
        optimal(lengths, 1_000)


def test_too_large_a_sample_is_told_in_the_unit_of_the_cap():
    cap = Cap(limit=100, size=quadratic, unit="pixels")
    admit(np.array([5, 32]), cap)  # 32 + 64 = 96
    with pytest.raises(SampleTooLargeError, match=r"100 pixels in .* pixels for this") as caught:
        admit(np.array([5, 33]), cap)  # 33 + 68.06 = 101.06
    raised = float(caught.value.remedy.split()[-2])
    admit(np.array([5, 33]), Cap(limit=raised, size=quadratic, unit="pixels"))


def test_too_large_a_sample_is_told_what_memory_would_do():
    cap = Cap(limit=2**20, size=lambda n, length: 5000 * n * length, unit="bytes")
    with pytest.raises(SampleTooLargeError, match=r"at most 1.00 MiB .* 1.43 MiB for") as caught:
        admit(np.array([5, 300]), cap)
    told = caught.value.remedy.split("memory to ")[1].split(",")[0]
    assert told == "1.44 MiB"
    admit(np.array([5, 300]), replace(cap, limit=1.44 * 2**20))


def test_longest_first_and_stable():
    assert by_length(np.array([2, 5, 2, 9, 5])).tolist() == [3, 1, 4, 0, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_fixed_micro_batches(size):
    plan = fixed(7, size)
    assert [k for positions in plan for k in positions] == list(range(7))
    assert all(len(positions) == size for positions in list(plan)[:-1])


def test_fixed_micro_batches_of_like_length():
    plan = fixed(5, 2, lengths=np.array([1, 9, 2, 8, 3]))
    assert [positions.tolist() for positions in plan] == [[1, 3], [4, 2], [0]]
    assert (plan.tokens, plan.padded_tokens) == (23, 9 + 9 + 3 + 3 + 1)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([1, 2], "shape"),
        ([[1], [2], [3]], "shape"),
        ([1, -2, 3], r"lengths\[1\]"),
        ([1.5, 2, 3], "1.5"),
    ],
)
def test_bad_lengths_are_refused(lengths, told):
    with pytest.raises(ArgumentError, match=told):
        checked_lengths(lengths, 3)
