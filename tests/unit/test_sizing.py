"""How large micro-batches may be, found by a trial that computes bytes from a formula."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradaccum.errors import ArgumentError, SampleTooLargeError
from gradaccum.memory import Budget, Needs, Probe
from gradaccum.partition import Cap, CappedCut, Cost, FixedCut
from gradaccum.sizing import Told, UnderBudget

MIB = 2**20
CPU = torch.device("cpu")
NEEDS = Needs(
    parameters=3 * MIB,
    buffers=MIB // 8,
    snapshot=MIB // 8,
    gradient_sums=2 * MIB,
    optimizer_state=4 * MIB,
    master_weights=0,
    averages=0,
    update=MIB // 2,
)
# Bytes after each operation: base, by n L, by n L^2, by L.
TEXT = np.array([[900_000, 5_000, 0.0, 0], [9_000, 7_000, 60.0, 0], [0, 15_000, 10.0, 1_000.0]])


class Formula:
    """A trial that knows how many bytes each operation leaves alive.

    Args:
        lengths: Of the samples; None where they have none.
        rows: Coefficients by operation.
        room: Bytes that the device has beside what is there at rest.
    """

    def __init__(self, lengths=None, rows=TEXT, room=float("inf"), needs=NEEDS) -> None:
        self.lengths, self.rows, self.room, self.held = lengths, rows, room, needs
        self.open = False
        self.tried: list[tuple[int, int]] = []  # samples and padded length of each probe
        self.stopped: list[tuple[int, int]] = []  # those that the budget or the device stopped

    @contextmanager
    def opened(self):
        self.open = True
        yield
        self.open = False

    def needs(self):
        return self.held

    def probe(self, positions, budget=None):
        assert self.open
        assert len(set(positions.tolist())) == len(positions) > 0
        count = len(positions)
        length = 1 if self.lengths is None else max(int(self.lengths[positions].max()), 1)
        self.tried.append((count, length))
        timeline = self.timeline(count, length)
        room = self.room if budget is None else min(self.room, budget.bytes - self.held.rest)
        if timeline.max() > room:
            self.stopped.append((count, length))
            return None
        peak = int(timeline.max())
        return Probe(count=count, length=length, timeline=timeline, kept=peak, peak=peak)

    def timeline(self, count, length):
        rows = self.rows * [1.0, 0.95, 0.95, 1.0] if count == 1 else self.rows
        return rows @ [1, count * length, count * length**2, length]

    def above(self, count, length):
        """Return what a micro-batch needs beside what is there at rest."""
        return self.timeline(count, length).max()

    def bytes(self, count, length):
        return max(self.held.rest + self.above(count, length), self.held.least)


def sized(trial, budget, num_samples=None, **options):
    budget = budget if budget is None else Budget(bytes=budget)
    num_samples = len(trial.lengths) if num_samples is None else num_samples
    found = UnderBudget(budget=budget, **options)(num_samples, trial.lengths, trial)
    assert not trial.open
    return found


def uneven(count=200, longest=300, seed=0):
    draw = np.random.default_rng(seed)
    return np.minimum(draw.lognormal(4, 0.9, count).astype(int) + 2, longest)


def shapes(cut, lengths):
    plan = cut(len(lengths), lengths)
    assert sorted(k for positions in plan for k in positions) == list(range(len(lengths)))
    return [(len(positions), plan.padded_length(k)) for k, positions in enumerate(plan)]


def test_what_was_told_is_not_tried():
    cut, trial = FixedCut(size=3), Formula()
    assert Told(cut)(5, None, trial) is cut
    assert trial.tried == []


@pytest.mark.parametrize("mib", [30, 60, 200])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_fill_the_budget_and_stay_below_it(mib, seed):
    lengths = uneven(seed=seed)
    trial = Formula(lengths)
    cut = sized(trial, mib * MIB)
    assert cut.cap.unit == "bytes"
    assert max(trial.bytes(*shape) for shape in shapes(cut, lengths)) <= mib * MIB
    others = uneven(longest=310, seed=seed + 100)  # effective batches that come later
    assert max(trial.bytes(*shape) for shape in shapes(cut, others)) <= mib * MIB
    for length in (1, 7, 50, 200, 300):
        most = cut.cap.most(length, 10**6)
        assert trial.bytes(most, length) <= mib * MIB
        assert trial.above(most + 1, length) * 1.006 + NEEDS.rest > mib * MIB


@pytest.mark.parametrize("mib", [30, 60, 200])
@pytest.mark.parametrize("seed", range(4))
def test_probes_stay_below_half_of_what_the_budget_leaves(mib, seed):
    trial = Formula(uneven(seed=seed))
    sized(trial, mib * MIB)
    assert len(trial.tried) == 9
    assert len(set(trial.tried)) == len(trial.tried)  # each shape once
    assert trial.tried[0] == (1, trial.lengths.min())
    several = [trial.above(*shape) for shape in trial.tried if shape[0] > 1]
    assert max(several) <= 0.5 * (mib * MIB - NEEDS.rest)
    assert max(several) > 0.3 * (mib * MIB - NEEDS.rest)  # a large one, as a check of the fit
    for shape in trial.tried:
        assert trial.bytes(*shape) <= mib * MIB
    assert trial.stopped == []


def text(kind, count, seed):
    """Return lengths as they come: of one kind, of two, with one that is far longer, all long."""
    draw = np.random.default_rng(seed)
    if kind == "lognormal":
        return np.minimum(draw.lognormal(4, 0.9, count).astype(int) + 2, 1000)
    if kind == "two kinds":
        short, long = draw.integers(5, 12, count), draw.integers(500, 1000, count)
        return np.where(draw.random(count) < 0.5, short, long)
    if kind == "outlier":
        return np.append(draw.integers(20, 40, count - 1), 1000)
    return draw.integers(900, 1400, count)


@pytest.mark.parametrize("room", [1.1, 1.5, 30])
@pytest.mark.parametrize("kind", ["lognormal", "two kinds", "outlier", "long"])
@pytest.mark.parametrize("squared", [0, 30])
def test_whatever_fits_is_let_through_and_nothing_else(kind, room, squared):
    """Budgets with room for the longest sample and little more, beside a base that weighs a lot.

    Such as the gradient of an embedding: it is there whatever the micro-batch. Probes that would
    not have fit if it grew with them were left out; long samples were then refused that needed
    less than the budget, and micro-batches made that needed several times as much.
    """
    for seed in range(4):
        lengths = text(kind, 64, seed)
        base = [0, 10**5, 2 * 10**6, 6 * 10**6][seed % 4]
        rows = np.array([[base, 900, 0, 0], [10_000, 700, squared, 0], [0, 1_500, 4, 100]])
        trial = Formula(lengths, rows)
        longest = int(lengths.max())
        free = max(room * trial.above(1, longest), NEEDS.update)
        cut = sized(trial, int(NEEDS.rest + free))
        assert len(trial.stopped) <= 2
        for count, length in shapes(cut, lengths):
            assert trial.above(count, length) <= 1.05 * free  # alone, 5 % less are needed
        for length in (longest, int(np.median(lengths))):
            assert 0 < trial.above(cut.cap.most(length, 64), length) <= 1.05 * free


rows = st.lists(
    st.tuples(st.integers(0, 10**5), st.integers(1, 3_000), st.floats(0, 30), st.integers(0, 500)),
    min_size=1,
    max_size=4,
).map(lambda found: np.array(found, dtype=float))


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(4, 60), min_size=1, max_size=60).map(np.array),
    rows=rows,
    mib=st.floats(10.5, 40),
)
def test_any_formula(lengths, rows, mib):
    """Whatever the bytes grow with: nothing that is tried or cut exceeds the budget."""
    budget = int(mib * MIB)
    trial = Formula(lengths, rows)
    cut = sized(trial, budget)
    assert len(trial.stopped) <= 2
    try:
        found = shapes(cut, lengths)
    except SampleTooLargeError:
        assert 1.02 * trial.bytes(1, max(int(lengths.max()), 1)) > budget
    else:
        assert max(trial.bytes(*shape) for shape in found) <= budget


def test_long_sequences_of_which_one_fits_and_two_do_not():
    lengths = np.random.default_rng(0).integers(1_200, 1_400, 40)
    trial = Formula(lengths)
    one, two = trial.above(1, 1_400), trial.above(2, 1_200)
    cut = sized(trial, int(NEEDS.rest + 1.02 * one))
    assert two > 1.02 * one
    assert set(shapes(cut, lengths)) == {(1, int(length)) for length in lengths}
    assert trial.stopped == [(2, int(np.sort(lengths)[1]))]  # one more than fits, once
    assert all(count == 1 for count, _ in set(trial.tried) - set(trial.stopped))


@pytest.mark.parametrize("mib", [9, 9.5])
def test_a_budget_below_what_a_step_holds(mib):
    trial = Formula(uneven())
    with pytest.raises(ArgumentError) as caught:
        sized(trial, int(mib * MIB))
    told = caught.value
    assert told.call == f"memory='{mib:.2f} MiB'"
    assert told.expected.startswith("at least 9.75 MiB")
    assert told.got == (
        "parameters 3.00 MiB, buffers 128 KiB, snapshot 128 KiB, gradient sums 2.00 MiB, "
        "optimizer state 4.00 MiB, "
        "update 512 KiB"
    )
    assert trial.tried == []


def test_samples_without_lengths_go_by_number():
    rows = np.array([[50_000, 7_000, 0, 0], [400_000, 3_000, 0, 0]], dtype=float)
    trial = Formula(None, rows)
    budget = 60 * MIB
    cut = sized(trial, budget, 64)
    assert isinstance(cut, FixedCut)
    room = budget - NEEDS.rest
    assert cut.size == int((room / 1.005 - 50_000) // 7_000)
    assert trial.tried == [(1, 1), (2, 1), (4, 1), (16, 1)]  # a quarter of the samples
    trial = Formula(None, rows)
    cut = sized(trial, 11 * MIB, 600)
    assert trial.bytes(cut.size, 1) <= 11 * MIB < trial.bytes(cut.size + 4, 1)
    (large, _) = trial.tried.pop()
    assert trial.above(large, 1) <= 0.5 * (11 * MIB - NEEDS.rest) < trial.above(large + 1, 1)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [True, False])
def test_few_samples(num_samples, lengths):
    trial = Formula(np.arange(10, 10 + num_samples) if lengths else None)
    cut = sized(trial, 60 * MIB, num_samples)
    several = np.arange(10, 200)
    if lengths:
        assert max(trial.bytes(*shape) for shape in shapes(cut, several)) <= 60 * MIB
    else:
        assert trial.bytes(cut.size, 1) <= 60 * MIB
    assert max(count for count, _ in trial.tried) <= num_samples


def test_samples_of_no_tokens():
    lengths = np.zeros(9, dtype=np.int64)
    trial = Formula(lengths)
    assert shapes(sized(trial, 60 * MIB), lengths) == [(9, 0)]
    lengths = np.r_[np.zeros(5, dtype=np.int64), np.arange(0, 200, 7)]
    few, none = Formula(np.maximum(lengths, 1)), Formula(lengths)
    sized(few, 60 * MIB)
    sized(none, 60 * MIB)
    assert few.tried == none.tried


def test_a_sample_that_needs_more_than_the_budget_is_named():
    lengths = np.array([20] * 30 + [5_000] + [30] * 30)
    trial = Formula(lengths)
    cut = sized(trial, 60 * MIB)
    with pytest.raises(SampleTooLargeError, match="sample 30 ") as caught:
        cut(len(lengths), lengths)
    assert caught.value.expected == "at most 60.0 MiB in a micro-batch"
    told = caught.value.remedy.split("raise memory to ")[1].split(",")[0]
    enough = sized(Formula(lengths), Budget.of(told).bytes)
    assert (1, 5_000) in shapes(enough, lengths)


def test_a_sample_without_length_that_needs_more_than_the_budget():
    trial = Formula(None, np.array([[0, 70.0 * MIB, 0, 0]]))
    with pytest.raises(SampleTooLargeError, match="raise memory to"):
        sized(trial, 60 * MIB, 8)


@pytest.mark.parametrize("lengths", [uneven(), None])
def test_a_device_that_is_full(lengths):
    trial = Formula(lengths, room=0)
    told = "out of memory for one sample" if lengths is None else r"smallest of .* \(8 tokens\)"
    with pytest.raises(ArgumentError, match=told) as caught:
        sized(trial, 60 * MIB, 200)
    assert caught.value.call == "memory='60.0 MiB'"
    assert len(trial.tried) == 1


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3])
def test_a_device_with_less_than_the_budget(share):
    """Probes that do not fit are left out; what is found goes by the others."""
    lengths = uneven()
    first = Formula(lengths).above(1, int(lengths.min()))
    trial = Formula(lengths, room=first + share * 51 * MIB)
    cut = sized(trial, 60 * MIB)
    assert trial.stopped
    assert len(trial.tried) > len(trial.stopped)
    if len(trial.tried) - len(trial.stopped) >= 4:
        assert max(trial.bytes(*shape) for shape in shapes(cut, lengths)) <= 60 * MIB


def test_what_is_predicted_is_at_least_what_the_update_needs():
    trial = Formula(np.arange(1, 9), np.array([[9, 9, 0, 0]]))
    assert sized(trial, 60 * MIB).cap.size(1, 1) == NEEDS.least


def test_a_long_sample_is_not_tried_where_shorter_ones_say_that_it_will_not_fit():
    trial = Formula(np.array([20, 20, 20, 20, 40, 80, 5_000]))
    cut = sized(trial, 60 * MIB)
    assert max(length for _, length in trial.tried) == 80
    with pytest.raises(SampleTooLargeError):
        cut.admit(trial.lengths)


def test_the_cost_is_the_users():
    lengths = uneven()
    for cost in (Cost(), Cost(fixed=5)):
        assert sized(Formula(lengths), 60 * MIB, cost=cost).cost == cost


def test_a_cap_that_was_found_learns_as_one_that_was_told():
    lengths = uneven()
    cut = sized(Formula(lengths), 60 * MIB)
    count, length = shapes(cut, lengths)[0]
    lower = shapes(cut.below(count, length), lengths)[0]
    assert lower[0] <= count // 2
    assert isinstance(cut, CappedCut)
    assert isinstance(cut.cap, Cap)
