"""Effective batches whose size changes, against a loop that hands out sample after sample."""

import json
import warnings
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

import gradaccum as ga
from gradaccum.batch import effective_batch
from gradaccum.course import Place
from gradaccum.errors import ArgumentError
from gradaccum.sizes import Progress


class InTurn:
    """An iterable of numbers."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Sharded(IterableDataset):
    """Numbers that workers share; the order depends on how many each reads at a time."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        yield from range(worker.id, self.count, worker.num_workers)


FUNCTIONS = {
    "by steps": lambda p: 1 + p.steps % 4,
    "by samples": lambda p: 1 + p.samples // 9,
    "by tokens": lambda p: 1 + p.tokens // 25,
    "falling": lambda p: max(1, 7 - p.steps),
}


@st.composite
def schedules(draw):
    """Draw the arguments that say how large effective batches are."""
    kind = draw(st.sampled_from(["number", "mapping", "function"]))
    if kind == "number":
        return {"size": draw(st.integers(1, 9))}
    if kind == "function":
        return {"size": FUNCTIONS[draw(st.sampled_from(sorted(FUNCTIONS)))]}
    later = draw(st.dictionaries(st.integers(1, 60), st.integers(1, 9), max_size=3))
    by = draw(st.sampled_from(["steps", "samples", "tokens"]))
    return {"size": later | {0: draw(st.integers(1, 9))}, "size_by": by}


@st.composite
def cases(draw):
    """Draw a dataset and all arguments; lengths where something counts tokens."""
    schedule, other = draw(schedules()), draw(schedules())
    by_tokens = "tokens" in (schedule.get("size_by"), other.get("size_by"))
    count = draw(st.integers(1, 25))
    options = {"last": draw(st.sampled_from(["keep", "drop"])), "seed": draw(st.integers(0, 3))}
    options |= draw(
        st.one_of(
            st.integers(1, 3).map(lambda n: {"epochs": n}),
            st.integers(1, 20).map(lambda n: {"steps": n}),
        )
    )
    if by_tokens or draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
        options["lengths"] = lengths if not by_tokens else [1 + k for k in lengths]
    iterable = "lengths" not in options and draw(st.booleans())
    if not iterable:
        options["shuffle"] = draw(st.booleans())
    dataset = InTurn(count) if iterable else range(count)
    return SimpleNamespace(dataset=dataset, count=count, schedule=schedule, other=other, **options)


def options_of(case):
    beside = ("dataset", "count", "schedule", "other")
    return {name: value for name, value in vars(case).items() if name not in beside}


def build(case, schedule):
    return ga.effective_batches(case.dataset, **schedule, **options_of(case))


def in_force(schedule, steps, samples, tokens):
    """Return the size that holds at these counts."""
    size, by = schedule["size"], schedule.get("size_by", "steps")
    if callable(size):
        return size(Progress(steps=steps, samples=samples, tokens=tokens))
    if isinstance(size, int):
        return size
    count = {"steps": steps, "samples": samples, "tokens": tokens}[by]
    return size[max(key for key in size if key <= count)]


def order_of(case, epoch):
    if not getattr(case, "shuffle", False):
        return list(range(case.count))
    return np.random.default_rng([case.seed, epoch]).permutation(case.count).tolist()


def twin(case, schedule, behind=None):
    """Hand out sample after sample, from behind an effective batch on.

    Each effective batch is a record of its samples, the size that was in force, and where
    training is behind it: epoch, samples of the epoch, steps, samples, tokens.
    """
    epoch, handed, steps, samples, tokens = behind or (0, 0, 0, 0, 0)
    lengths = getattr(case, "lengths", None)
    while True:
        batch = []
        for place, index in enumerate(order_of(case, epoch)):
            if place < handed:
                continue
            if not batch:
                size = in_force(schedule, steps, samples, tokens)
            batch.append(index)
            whole = len(batch) == size
            if not whole and place + 1 < case.count:
                continue
            if not whole and case.last == "drop" and handed > 0:
                break
            handed, steps, samples = handed + len(batch), steps + 1, samples + len(batch)
            if lengths is not None:
                tokens += sum(lengths[k] for k in batch)
                batch.sort(key=lambda k: -lengths[k])
            place_behind = (epoch, handed, steps, samples, tokens)
            yield SimpleNamespace(epoch=epoch, samples=batch, size=size, behind=place_behind)
            batch = []
        epoch, handed = epoch + 1, 0


def run_of(case, schedule, behind=None, done=0):
    """Return what is left of one iteration, by the twin."""
    found = []
    for batch in twin(case, schedule, behind):
        if hasattr(case, "epochs") and batch.epoch == case.epochs:
            return found
        if hasattr(case, "steps") and done + len(found) == case.steps:
            return found
        found.append(batch)


def samples_of(batch):
    return [batch.sample(k) for k in range(len(batch))]


def state_behind(batches, count):
    """Return the state in JSON when so many effective batches were handed out."""
    if count:
        for done, _ in enumerate(batches, start=1):
            if done == count:
                return json.loads(json.dumps(batches.state_dict()))
    return json.loads(json.dumps(batches.state_dict()))


@given(case=cases())
@settings(deadline=None, max_examples=300)
def test_samples_sizes_and_length_are_those_of_a_plain_loop(case):
    batches, expected = build(case, case.schedule), run_of(case, case.schedule)
    has_length = not isinstance(case.dataset, InTurn) or hasattr(case, "steps")
    if has_length:
        assert len(batches) == len(expected)
    sizes = [batches.size]
    found = []
    for batch in batches:
        found.append(samples_of(batch))
        sizes.append(batches.size)
        if has_length:
            assert len(batches) == len(expected)  # also while it is under way
    assert found == [batch.samples for batch in expected]
    assert sizes[:-1] == [batch.size for batch in expected]
    if hasattr(case, "steps"):  # the next iteration goes on behind this one
        again = run_of(case, case.schedule, behind=expected[-1].behind)
        assert [samples_of(batch) for batch in batches] == [batch.samples for batch in again]


@given(case=cases())
@settings(deadline=None, max_examples=100)
def test_a_resumed_run_is_the_rest_of_an_unbroken_one(case):
    """C9, transformers#5605, at each place to stop at."""
    expected = run_of(case, case.schedule)
    for at in range(len(expected) + 1):
        resumed = build(case, case.schedule)
        resumed.load_state_dict(state_behind(build(case, case.schedule), at))
        if not isinstance(case.dataset, InTurn):
            assert len(resumed) == len(expected) - at
        assert [samples_of(b) for b in resumed] == [b.samples for b in expected[at:]]


def told(schedule):
    if callable(schedule["size"]):
        return "a function"
    size, by = schedule["size"], schedule.get("size_by", "steps")
    if isinstance(size, int) or len(size) == 1:
        return str(size if isinstance(size, int) else size[0])
    later = "".join(f",{count}:{size[count]}" for count in sorted(size) if count)
    return f"{size[0]}{later} by {by}"


def ended(case, behind):
    """Return the beginning of the next epoch, if what is left of this one is dropped."""
    epoch, _, *counts = behind
    following = next(twin(case, case.schedule, behind))
    return behind if following.epoch == epoch else (following.epoch, 0, *counts)


@given(case=cases())
@settings(deadline=None, max_examples=100)
def test_another_size_goes_on_from_the_next_unseen_sample(case):
    expected = run_of(case, case.schedule)
    names = [told(case.schedule), told(case.other)]
    for at in range(1, len(expected) + 1):
        resumed = build(case, case.other)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            resumed.load_state_dict(state_behind(build(case, case.schedule), at))
        messages = [str(one.message) for one in warned]
        assert len(messages) == (names[0] != names[1])
        for message in messages:
            assert f"was {names[0]} when" in message
            assert f"is {names[1]} from the next" in message
        behind = expected[at - 1].behind
        if not isinstance(case.dataset, InTurn):  # an epoch that has ended stays ended
            behind = ended(case, behind)
        rest = run_of(case, case.other, behind=behind, done=at)
        if not isinstance(case.dataset, InTurn):
            assert len(resumed) == len(rest)
            if rest:
                assert resumed.epoch == rest[0].epoch
                assert resumed.size == rest[0].size
        assert [samples_of(b) for b in resumed] == [b.samples for b in rest]


@pytest.mark.parametrize("source", [range(11), InTurn(11)])
@pytest.mark.parametrize(
    ("rule", "scales"),
    [
        ("none", [1, 1, 1, 1]),
        ("linear", [1, 1.25, 1.25, 0.25]),
        ("sqrt", [1, 1.25**0.5, 1.25**0.5, 0.5]),
    ],
)
def test_the_learning_rate_follows_the_size_in_force(source, rule, scales):
    """The third has the last 2 samples of its epoch, and the scale of 5."""
    size = {0: 4, 1: 5, 3: 1}
    batches = list(ga.effective_batches(source, size, lr_rule=rule, steps=4))
    assert [len(batch) for batch in batches] == [4, 5, 2, 1]
    assert [batch.lr_scale for batch in batches] == pytest.approx(scales)
    by_function = ga.effective_batches(
        source, lambda p: size[max(k for k in size if k <= p.steps)], lr_rule=rule, steps=4
    )
    assert [batch.lr_scale for batch in by_function] == [batch.lr_scale for batch in batches]


def test_the_first_size_is_that_of_the_beginning_of_training():
    """Not that of the state that was resumed from."""
    options = {"size": {0: 2, 1: 4}, "lr_rule": "linear", "steps": 3}
    resumed = ga.effective_batches(range(20), **options)
    resumed.load_state_dict(state_behind(ga.effective_batches(range(20), **options), 2))
    assert [batch.lr_scale for batch in resumed] == [2.0]


def test_any_other_effective_batch_leaves_the_learning_rate_alone():
    assert effective_batch([{"x": 1}]).lr_scale == 1.0
    assert [batch.lr_scale for batch in ga.effective_batches(range(3), {0: 1, 1: 2})] == [1.0, 1.0]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("schedule", [{0: 2, 1: 5, 4: 3}, lambda p: 1 + p.samples // 4])
def test_workers_read_ahead_by_the_schedule(schedule, known):
    options = {"size": schedule, "epochs": 2, "lengths": [1] * 13 if known else None}
    alone = [samples_of(b) for b in ga.effective_batches(list(range(13)), **options)]
    for workers in (1, 2):
        shared = ga.effective_batches(list(range(13)), **options, workers=workers)
        assert [samples_of(b) for b in shared] == alone


def test_workers_read_no_further_ahead_than_the_size_in_force(monkeypatch):
    """A worker has two chunks under way: none is of a later, much larger effective batch."""
    chunks = []

    def loader(dataset, batch_sampler, **_):
        chunks.extend(batch_sampler)
        return [[dataset[k] for k in chunk] for chunk in batch_sampler]

    monkeypatch.setattr("gradaccum.reader.DataLoader", loader)
    batches = ga.effective_batches(range(100), {0: 4, 5: 80}, workers=2, shuffle=False)
    assert [len(batch) for batch in batches] == [4] * 5 + [80]
    assert [len(chunk) for chunk in chunks] == [1] * 20 + [20] * 4
    assert list(chain(*chunks)) == list(range(100))


@pytest.mark.parametrize("at", [1, 2])
def test_workers_that_share_an_iterable_go_on_with_another_size(at):
    """What each reads at a time is as before, or samples would come twice."""

    def shared(size):
        return ga.effective_batches(Sharded(31), size, workers=2)

    expected = list(chain(*(samples_of(batch) for batch in shared(8))))
    assert sorted(expected) == list(range(31))
    assert expected != sorted(expected)
    resumed = shared(3)
    with pytest.warns(ga.SizeChangedWarning):
        resumed.load_state_dict(state_behind(shared(8), at))
    assert list(chain(*(samples_of(batch) for batch in resumed))) == expected[8 * at :]


@pytest.mark.parametrize("source", [range(12), InTurn(12)])
def test_an_epoch_that_begins_anew_counts_as_it_did(source):
    def build():
        return ga.effective_batches(source, {0: 1, 2: 4}, steps=6)

    expected = [samples_of(batch) for batch in build()]
    batches = build()
    for _ in zip(range(4), batches, strict=False):
        pass
    assert [samples_of(batch) for batch in batches] == expected


def test_the_length_of_a_size_that_moves_no_more_is_not_counted_out():
    million = 10**6
    assert len(ga.effective_batches(range(million), 1, epochs=million)) == million**2
    batches = ga.effective_batches(range(million), {0: million, 1: 10}, epochs=million)
    assert len(batches) == 1 + (million - 1) * million // 10


def test_a_rest_that_the_new_size_drops_ends_the_epoch():
    state = state_behind(ga.effective_batches(range(10), 4, last="drop", epochs=2), 1)
    resumed = ga.effective_batches(range(10), 8, last="drop", epochs=2)
    with pytest.warns(ga.SizeChangedWarning, match=r"is 8 from the next unseen sample of epoch 0"):
        resumed.load_state_dict(state)
    assert (resumed.epoch, len(resumed)) == (1, 1)
    assert [len(batch) for batch in resumed] == [8]


def test_the_warning_is_where_the_state_is_loaded():
    state = ga.effective_batches(range(6), 2).state_dict()
    with pytest.warns(ga.SizeChangedWarning) as warned:
        ga.effective_batches(range(6), {0: 3}).load_state_dict(state)
    assert warned[0].filename == __file__


def test_the_same_size_in_another_spelling_is_no_other():
    state = ga.effective_batches(range(6), 2).state_dict()
    ga.effective_batches(range(6), {0: 2}, size_by="samples").load_state_dict(state)


def test_a_state_without_tokens_cannot_go_on_by_tokens():
    state = state_behind(ga.effective_batches(range(6), 2), 1)
    resumed = ga.effective_batches(range(6), {0: 2}, size_by="tokens", lengths=[1] * 6)
    with pytest.raises(ArgumentError, match="2 samples of unknown length"):
        resumed.load_state_dict(state)


def test_a_function_that_fails_later_fails_before_its_epoch():
    batches = ga.effective_batches(range(6), lambda p: 2 if p.steps < 4 else 0, epochs=3)
    with pytest.raises(ArgumentError, match=r"size\(Progress\(steps=4, samples=8, tokens=0\)\)"):
        len(batches)
    found = []
    with pytest.raises(ArgumentError, match="got 0"):
        found.extend(batches)


def test_a_place_in_json():
    place = Place().after(3, 7).next_epoch().after(2)
    assert Place.from_dict(json.loads(json.dumps(place.as_dict()))) == place
    assert place.now == Progress(steps=2, samples=5, tokens=7)
    assert (place.epoch, place.samples, place.anew().samples) == (1, 2, 0)
