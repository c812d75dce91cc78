"""Peaks predicted from a few small micro-batches, against the formulas that these came from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.memory import Probe, at_most, fit
from gradaccum.memory.model import _undominated

# Bytes after each operation: base, by n L, by n L^2, by L. Each is the highest somewhere.
SEVERAL = np.array(
    [
        [900_000, 40, 0.0, 0],  # the gradient of the embedding
        [1_000, 52, 6.0, 300],  # attention
        [0, 2_100, 0.5, 0],  # logits
        [300, 30, 4.0, 20_000],  # what all samples share
        [200, 10, 0.1, 10],  # never
    ]
)
ALONE = SEVERAL * [1.0, 0.5, 0.75, 1.0]  # some copies are left out
FOUR = [(2, 4), (4, 4), (2, 12), (4, 20)]
FAR = [(2, 1), (9, 3), (300, 2), (64, 40), (2, 400), (8, 512), (500, 512), (2, 4096), (2000, 7)]


def bytes_of(count, length):
    rows = ALONE if count == 1 else SEVERAL
    return rows @ [1, count * length, count * length**2, length]


def probe(count, length, timeline=None, peak=None):
    timeline = bytes_of(count, length) if timeline is None else np.array(timeline)
    return Probe(
        count=count,
        length=length,
        timeline=timeline,
        kept=int(timeline[0]),
        peak=int(timeline.max()) if peak is None else peak,
    )


def line(counts, seen, length=1):
    """Return probes of micro-batches of one length, with one operation each."""
    return [probe(n, length, [bytes_]) for n, bytes_ in zip(counts, seen, strict=True)]


def test_four_probes_say_all_about_micro_batches_a_thousand_times_as_large():
    peaks = fit([probe(*shape) for shape in FOUR], rest=5_000, update=0)
    highest = set()
    for shape in FAR:
        expected = 5_000 + bytes_of(*shape).max()
        assert peaks.predicted(*shape) == pytest.approx(expected, rel=1e-6)
        highest.add(int(bytes_of(*shape).argmax()))
    assert highest == {0, 1, 2, 3}  # the peak moved from one operation to another
    assert {int(bytes_of(*shape).argmax()) for shape in FOUR} == {0}  # and was seen in one alone
    assert peaks.margin == 0.005


def test_one_sample_alone_has_a_fit_of_its_own():
    shapes = [*FOUR, (1, 4), (1, 8), (1, 16)]
    peaks = fit([probe(*shape) for shape in shapes], rest=5_000, update=0)
    for length in (1, 40, 700, 5_000):
        alone = 5_000 + bytes_of(1, length).max()
        assert peaks.predicted(1, length) == pytest.approx(alone, rel=1e-6)
        several = 5_000 + bytes_of(2, length).max()
        assert peaks.predicted(2, length) == pytest.approx(several, rel=1e-6)


def test_more_samples_are_never_predicted_below_one():
    """Two families are fitted apart: where they disagree, the larger holds."""
    peaks = fit([*line([1], [900]), *line([2, 4], [20, 40])], rest=0, update=0)
    assert [peaks.predicted(n, 1) for n in (1, 2, 80, 100)] == pytest.approx([900, 900, 900, 1000])


def test_one_family_stands_for_the_other():
    only_alone = fit(line([1, 1, 1], [10, 30, 10]), rest=0, update=0)
    assert only_alone.predicted(4, 1) == pytest.approx(4 * only_alone.predicted(1, 1))
    only_several = fit(line([2, 4], [50, 90]), rest=0, update=0)
    assert only_several.predicted(1, 1) == pytest.approx(30)


@pytest.mark.parametrize("times", [1, 2])
def test_one_shape_is_taken_in_proportion(times):
    peaks = fit([probe(2, 10, [100, 300, 200])] * times, rest=7, update=0)
    assert peaks.predicted(2, 10) == pytest.approx(307)
    assert peaks.predicted(6, 10) == pytest.approx(907)
    assert peaks.predicted(2, 40) == pytest.approx(1207)
    assert peaks.predicted(1, 10) == pytest.approx(157)


@pytest.mark.parametrize("length", [1, 37])
def test_samples_of_one_length_differ_in_number_alone(length):
    counts = [2, 4, 8]
    peaks = fit(line(counts, [70 + 30 * n for n in counts], length), rest=0, update=0)
    for count in (2, 3, 100, 5_000):
        assert peaks.predicted(count, length) == pytest.approx(70 + 30 * count)


def test_operations_that_differ_in_number_are_fitted_apart():
    """As where a mask is built for padding alone: two kinds of micro-batches."""

    def masked(count, length):
        return [*bytes_of(count, length), 7 * count * length**2]

    plain = [probe(*shape) for shape in FOUR]
    padded = [probe(n, size, masked(n, size)) for n, size in ((2, 16), (4, 24), (2, 40), (5, 9))]
    model = fit([*plain, *padded], rest=0, update=0)
    assert model.predicted(30, 300) == pytest.approx(max(masked(30, 300)))
    lone = fit([*padded, probe(9, 9, [1.0])], rest=0, update=0)
    assert lone.predicted(30, 300) == pytest.approx(max(masked(30, 300)))


def test_where_no_two_shapes_ran_the_same_operations_peaks_are_fitted():
    timelines = {(2, 10): [100.0], (4, 10): [100.0, 200.0], (8, 10): [1.0, 2.0, 400.0]}
    model = fit([probe(*shape, line) for shape, line in timelines.items()], rest=0, update=0)
    assert model.several.shape == (1, 4)
    assert model.predicted(20, 10) == pytest.approx(1000)


def test_the_device_may_count_more_than_the_operations():
    """What kernels take for themselves is in the peak alone, and goes into the margin."""
    found = [probe(*shape, peak=int(1.03 * bytes_of(*shape).max())) for shape in FOUR]
    peaks = fit(found, rest=1_000, update=0)
    assert peaks.margin == pytest.approx(0.06, rel=1e-3)
    assert peaks(50, 50) == pytest.approx(1_000 + 1.06 * bytes_of(50, 50).max(), rel=1e-3)
    less = [probe(*shape, peak=1) for shape in FOUR]
    assert fit(less, rest=0, update=0).margin == 0.005


@pytest.mark.parametrize(
    ("seen", "margin"),
    [
        ([10, 20, 30, 40], 0.005),
        ([10, 20, 30, 44], 0.2),  # the first three say 40
        ([10, 20, 30, 36], 2 * (30 / 28.4 - 1)),  # least squares say 2 + 4.4 n
        ([10, 20, 30], 0.005),
        ([10, 20, 33], 0.2),
        ([10, 33], 0.005),  # one says nothing of the other
    ],
)
def test_the_margin_is_twice_the_largest_error(seen, margin):
    counts = [2, 4, 6, 8][: len(seen)]
    for order in (slice(None), slice(None, None, -1)):
        peaks = fit(line(counts, seen)[order], rest=50, update=0)
        assert peaks.margin == pytest.approx(margin)
        above = peaks.predicted(100, 1) - 50
        assert peaks(100, 1) == pytest.approx(50 + above * (1 + margin))


def test_errors_of_samples_alone_count_as_well():
    found = [
        probe(1, length, [bytes_])
        for length, bytes_ in zip((1, 2, 3, 4), (10, 20, 30, 44), strict=True)
    ]
    assert fit(found, rest=0, update=0).margin == pytest.approx(0.2)
    assert fit([*found, *line([2, 4], [20, 40])], rest=0, update=0).margin == pytest.approx(0.2)


def test_a_fit_of_fewer_terms_says_nothing_of_the_margin():
    """Three short micro-batches do not know what a long one needs; together they do."""
    found = [probe(*shape) for shape in ((2, 6), (4, 8), (9, 9), (2, 601))]
    assert fit(found, rest=0, update=0).margin == 0.005


def test_samples_alone_say_what_several_leave_open():
    rows = SEVERAL * [1, 1, 1, 0]

    def found(count, length):
        return probe(count, length, rows @ [1, count * length, count * length**2, length])

    alone, several = [(1, 5), (1, 50), (1, 500)], [(2, 5), (4, 5)]
    peaks = fit([found(*shape) for shape in (*several, *alone)], rest=0, update=0)
    for shape in ((2, 5), (3, 500), (40, 700)):
        assert peaks.predicted(*shape) == pytest.approx(found(*shape).peak, rel=1e-6)
    few = fit([found(*shape) for shape in several], rest=0, update=0)
    assert few.predicted(40, 700) < 0.5 * peaks.predicted(40, 700)


def test_never_below_what_the_update_needs():
    peaks = fit(line([2, 4], [20, 40]), rest=50, update=1_000)
    assert peaks(1, 1) == peaks(90, 1) == 1_000
    assert peaks.predicted(1, 1) == peaks.predicted(95, 1) == 1_000
    assert peaks.predicted(96, 1) == pytest.approx(1_010)
    assert peaks(95, 1) == pytest.approx(50 + 1.005 * 950)


terms = st.tuples(st.integers(0, 10**6), st.integers(0, 10**4), st.floats(0, 50), st.just(0))
SMALL = [[(2, 4), (4, 4), (2, 8)], [(1, 4), (1, 8), (1, 16)], [(1, 4), (2, 4), (1, 8), (4, 4)]]


@given(
    rows=st.lists(terms, min_size=1, max_size=3),
    shapes=st.sampled_from(SMALL),
    known=st.integers(1, 4),
    count=st.integers(2, 100),
    length=st.sampled_from([8, 9]) | st.integers(16, 2000),
)
def test_what_is_not_known_yet_is_taken_at_its_worst(rows, shapes, known, count, length):
    rows = np.array(rows)

    def found(count, length):
        return probe(count, length, rows @ [1, count * length, count * length**2, length])

    most = at_most([found(*shape) for shape in shapes[:known]])(count, length)
    assert most >= found(count, length).peak * (1 - 1e-6) - 1


def test_what_is_known_is_not_taken_at_its_worst():
    base = [probe(1, 4, [1e6 + 40]), probe(1, 8, [1e6 + 80])]
    assert at_most(base[:1])(2, 40) == pytest.approx(200 * (1e6 + 40))
    assert at_most(base)(2, 40) < 1e6 + 8_000
    assert at_most([probe(*shape) for shape in FOUR])(50, 500) == pytest.approx(
        bytes_of(50, 500).max(), rel=1e-6
    )


rows = st.lists(st.tuples(*[st.integers(-50, 50)] * 4), min_size=1, max_size=12)
features = st.tuples(*[st.floats(0, 1e6)] * 4)


@given(rows=rows, features=st.lists(features, min_size=1, max_size=5))
def test_rows_are_left_out_that_are_never_the_highest(rows, features):
    every = np.array(rows, dtype=float)
    kept = _undominated(every)
    assert {tuple(row) for row in kept} <= {tuple(row) for row in every}
    for one in features:
        assert (kept @ one).max() == pytest.approx((every @ one).max(), rel=1e-12, abs=1e-9)
    for i, row in enumerate(kept):
        assert not any((other >= row).all() for j, other in enumerate(kept) if i != j)
