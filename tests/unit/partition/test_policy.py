from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradaccum.errors import ArgumentError, SampleTooLargeError
from gradaccum.partition import Cap, CappedCut, Cost, FixedCut
from gradaccum.partition.policy import letting_through, with_bounds_of


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


CUTS = {
    "fixed": FixedCut(size=16),
    "tokens": CappedCut(cap=Cap(limit=1600)),
    "bytes": CappedCut(cap=Cap(limit=16000, size=lambda n, length: 10 * n * length, unit="bytes")),
}


def widths(cut, lengths):
    lengths = np.asarray(lengths)
    found = [(len(p), int(lengths[p].max())) for p in cut(len(lengths), lengths)]
    return sorted(found, reverse=True)  # where several cuts are cheapest, any may be taken


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_failures_halve_down_to_one(cut):
    """16 samples, and room for one: 16, 8, 4, 2, 1."""
    assert widths(cut, [100] * 16) == [(16, 100)]
    lengths, seen = [100] * 16, [16]
    while seen[-1] > 1 and len(seen) < 9:
        cut = cut.below(seen[-1], 100)
        seen.append(widths(cut, lengths)[0][0])
    assert seen == [16, 8, 4, 2, 1]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_failure_holds_for_about_its_length(cut):
    lower = cut.below(16, 100)
    assert widths(lower, [100] * 16) == [(8, 100)] * 2
    assert widths(lower, [160] * 10) == [(5, 160)] * 2  # 800 positions, as eight of 100
    assert widths(lower, [1600]) == [(1, 1600)]  # one is always tried
    assert widths(lower, [80] * 16) == [(10, 80), (6, 80)]
    assert widths(lower, [49] * 16) == widths(cut, [49] * 16)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_failure_is_forgotten_in_the_end(cut):
    lower, found = cut.below(16, 100), []
    for _ in range(4):
        found.append(widths(lower, [100] * 16)[0][0])
        lower = lower.relaxed()
    assert found == [8, 10, 12, 15]
    assert lower == cut


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_was_learnt_outlives_a_new_measurement(cut):
    lower = cut.below(16, 100)
    assert with_bounds_of(cut, lower) == lower
    assert with_bounds_of(cut, None) is cut
    other = CUTS["tokens" if isinstance(cut, FixedCut) else "fixed"]
    assert with_bounds_of(cut, other.below(16, 100)) is cut


def test_a_lower_failure_takes_the_place_of_a_higher_one():
    cap = Cap(limit=10_000).below(64, 100).below(32, 100).below(16, 100)
    assert len(cap.bounds) == 1
    assert cap.most(100, 100) == 8
    apart = Cap(limit=10_000).below(40, 50).below(2, 400)
    assert len(apart.bounds) == 2
    assert [apart.most(k, 999) for k in (400, 200, 199, 50, 25, 24)] == [1, 2, 5, 20, 40, 416]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    failures=st.lists(st.tuples(st.integers(2, 9), st.integers(1, 30)), max_size=3),
)
def test_the_cheapest_cut_under_bounds(lengths, failures):
    """Against every cut there is; and no micro-batch is above what was learnt."""
    cap = Cap(limit=60)
    for count, length in failures:
        cap = cap.below(count, length)
    assert [cap.most(k, 99) for k in range(1, 61)] == sorted(
        (cap.most(k, 99) for k in range(1, 61)), reverse=True
    )
    cost = Cost(fixed=7)
    ordered = sorted(lengths, reverse=True)

    def paid(parts):
        return sum(7 + len(part) * part[0] for part in parts)

    def cuts(rest):
        if not rest:
            yield []
            return
        for k in range(1, min(len(rest), cap.most(rest[0], 99)) + 1):
            for others in cuts(rest[k:]):
                yield [rest[:k], *others]

    plan = CappedCut(cap=cap, cost=cost)(len(lengths), np.array(lengths))
    found = [sorted((lengths[k] for k in part), reverse=True) for part in plan]
    assert all(len(part) <= cap.most(part[0], 99) for part in found)
    assert paid(found) == min(map(paid, cuts(ordered)))


def falls(at, to=0.93):
    """A size that was fitted to measurements: less from some length on."""

    def size(count, length):
        return 7 * count * length * (1.0 if length < at else to)

    return size


SORTED = [23, *[25] * 6, 26, *[27] * 2, *[28] * 2, *[29] * 3, 30, *[31] * 3, 32, 33, 34, 34, 35, 35]


@example(lengths=SORTED, at=29, to=0.6861, room=2.995, fixed=7)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    at=st.integers(2, 40),
    to=st.floats(0.5, 1),
    room=st.floats(1, 12),
    fixed=st.sampled_from([0, 7, 1e4]),
)
def test_sizes_that_fall_somewhere(lengths, at, to, room, fixed):
    """Each sample once, no micro-batch above the cap; and the longest first."""
    size = falls(at, to)
    cap = Cap(limit=room * max(size(1, length) for length in lengths), size=size)
    plan = CappedCut(cap=cap, cost=Cost(fixed=fixed))(len(lengths), np.array(lengths))
    assert sorted(k for part in plan for k in part) == list(range(len(lengths)))
    padded = [plan.padded_length(k) for k in range(len(plan))]
    assert all(
        size(len(part), length) <= cap.limit for part, length in zip(plan, padded, strict=True)
    )
    assert padded == sorted(padded, reverse=True)


def test_a_sample_that_is_too_large_need_not_be_the_longest():
    lengths = np.array([3, 29, 30, 29, 31])
    cut = CappedCut(cap=Cap(limit=203 - 1, size=falls(30)))  # 203, 195.3, 201.81
    for refuse in (lambda: cut(5, lengths), lambda: cut.admit(lengths)):
        with pytest.raises(SampleTooLargeError, match=r"sample 1 \(length 29\)") as caught:
            refuse()
        assert "raise the cap to 203 tokens" in caught.value.remedy
    lengths[[1, 3]] = 28
    assert cut(5, lengths).num_samples == 5


def test_a_sample_that_is_too_large_alone_may_be_let_through():
    lengths = np.array([5, 300, 7, 8, 9])
    for cut in (CUTS["tokens"], CUTS["bytes"]):
        tight = replace(cut, cap=replace(cut.cap, limit=cut.cap.limit / 100))
        with pytest.raises(SampleTooLargeError):
            tight(5, lengths)
        loose = letting_through(tight)
        loose.admit(lengths)
        found = widths(loose, lengths)
        assert [shape for shape in found if shape[1] == 300] == [(1, 300)]
        assert sum(count for count, _ in found) == 5
        assert all(cut.cap.of(*shape) <= tight.cap.limit for shape in found if shape[1] < 300)
    assert letting_through(CUTS["fixed"]) is CUTS["fixed"]
