import os
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

import gradaccum as ga
from gradaccum.collate import Collate
from gradaccum.errors import ArgumentError, DataError


class Reading:
    """A map-style dataset that notes what is read of it; sample k is k, of length k + 1."""

    def __init__(self, count):
        self.count, self.reads = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.reads.append(index)
        return {"input_ids": torch.full((index + 1,), index)}


class Sharded(IterableDataset):
    """An iterable dataset whose workers share its samples."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from range(first, self.count, step)


class Where:
    """A dataset of the processes that read it."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return os.getpid()


class WhereInTurn(IterableDataset):
    """The same without an index."""

    def __iter__(self):
        yield from (os.getpid() for _ in range(6))


def samples(batches):
    """Return the samples of each effective batch."""
    return [[batch.sample(k) for k in range(len(batch))] for batch in batches]


def flat(batches):
    return list(chain.from_iterable(samples(batches)))


def lengths(count):
    return np.arange(1, count + 1)


def test_a_seeded_order():
    one, same, other = (
        samples(ga.effective_batches(range(20), 6, seed=seed, epochs=2)) for seed in (3, 3, 4)
    )
    assert one == same != other
    assert one[:4] != one[4:]
    assert sorted(chain(*one[:4])) == sorted(chain(*one[4:])) == list(range(20))
    assert samples(ga.effective_batches(range(5), 2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_the_order_asks_no_global_generator():
    expected = samples(ga.effective_batches(range(20), 6))
    torch.manual_seed(99)
    np.random.seed(99)
    assert samples(ga.effective_batches(range(20), 6)) == expected


@pytest.mark.parametrize("source", [range(10), (k for k in range(10)), Sharded(10)])
@pytest.mark.parametrize(("last", "sizes"), [("keep", [4, 4, 2]), ("drop", [4, 4])])
def test_the_last_is_kept_or_dropped(source, last, sizes):
    if not hasattr(source, "__len__") and not isinstance(source, Sharded):
        source = (k for k in range(10))
    batches = ga.effective_batches(source, 4, last=last)
    assert [len(batch) for batch in batches] == sizes


@pytest.mark.parametrize("source", [range(3), iter(range(3)), Sharded(3)])
def test_the_only_one_of_an_epoch_is_kept(source):
    source = iter(range(3)) if not hasattr(source, "__len__") else source
    assert [len(batch) for batch in ga.effective_batches(source, 4, last="drop")] == [3]


def test_one_iteration_is_one_epoch_by_default():
    batches = ga.effective_batches(range(4), 2)
    epochs = [(batches.epoch, flat(batches)) for _ in range(3)]
    assert [epoch for epoch, _ in epochs] == [0, 1, 2]
    at_once = ga.effective_batches(range(4), 2, epochs=3)
    assert list(chain(*(found for _, found in epochs))) == flat(at_once)


@pytest.mark.parametrize("last", ["keep", "drop"])
def test_the_length_is_what_comes(last):
    for count in range(1, 9):
        batches = ga.effective_batches(range(count), 3, last=last, epochs=2)
        assert len(batches) == len(list(batches))


@pytest.mark.parametrize("source", [range(5), Sharded(5)])
def test_steps_in_place_of_epochs(source):
    batches = ga.effective_batches(source, 2, steps=7)
    assert len(batches) == 7
    assert [len(batch) for batch in batches] == [2, 2, 1, 2, 2, 1, 2]
    by_epoch = samples(ga.effective_batches(source, 2, epochs=3))
    again = ga.effective_batches(source, 2, steps=7)
    assert samples(again) == by_epoch[:7]
    assert samples(again)[:2] == by_epoch[7:]  # goes on where the last iteration ended


def test_the_epoch_is_that_of_the_next_effective_batch():
    batches = ga.effective_batches(range(4), 2, steps=1)
    assert [(batches.epoch, len(list(batches)))[0] for _ in range(5)] == [0, 0, 1, 1, 2]


def test_a_generator_gives_one_epoch():
    batches = ga.effective_batches((k for k in range(5)), 2, epochs=2)
    with pytest.raises(TypeError, match="generator has no len"):
        len(batches)
    iterator = iter(batches)
    assert samples(next(iterator) for _ in range(3)) == [[0, 1], [2, 3], [4]]
    with pytest.raises(DataError, match=r"epoch 1 .* iterated again"):
        next(iterator)


def test_a_generator_is_read_as_it_is_needed():
    read = []
    source = (read.append(k) or k for k in range(100))
    assert samples([next(iter(ga.effective_batches(source, 3)))]) == [[0, 1, 2]]
    assert read == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("known", [False, True])
def test_workers_give_the_same_samples(workers, known):
    data = TensorDataset(torch.arange(11))
    options = {"size": 4, "lengths": lengths(11) if known else None, "epochs": 2}
    alone = ga.effective_batches(data, **options)
    shared = ga.effective_batches(data, **options, workers=workers)
    for one, other in zip(alone, shared, strict=True):
        positions = np.arange(len(one))
        expected = one.micro_batch(positions, Collate())[0]
        assert other.micro_batch(positions, Collate())[0].tolist() == expected.tolist()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_of_an_iterable_dataset(workers):
    found = samples(ga.effective_batches(Sharded(11), 4, workers=workers))
    assert [len(batch) for batch in found] == [4, 4, 3]
    assert sorted(chain(*found)) == list(range(11))


def test_a_worker_of_any_iterable():
    expected = samples(ga.effective_batches(iter([5, 6, 7]), 2))
    assert samples(ga.effective_batches(iter([5, 6, 7]), 2, workers=1)) == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("source", [Where(), WhereInTurn()])
def test_workers_are_other_processes(source, workers):
    batches = ga.effective_batches(source, 3, workers=workers)
    assert (os.getpid() in flat(batches)) == (workers == 0)


@pytest.mark.parametrize("source", [range(6), Sharded(6)])
def test_workers_leave_the_global_generator_alone(source):
    state = torch.get_rng_state()
    list(ga.effective_batches(source, 2, workers=1))
    assert torch.equal(torch.get_rng_state(), state)


def reading(data, loss, **options):
    """Return an accumulator for `Reading`, with micro-batches of two."""
    model = torch.nn.Embedding(12, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ga.accumulator(
        model, optimizer, loss, micro_batch_size=2, pad={"input_ids": 0}, **options
    )


def test_samples_of_known_length_are_read_with_their_micro_batch():
    data, counts = Reading(12), []

    def loss(model, micro):
        counts.append(len(data.reads))
        return ga.Loss.of(model(micro["input_ids"]))

    accumulator = reading(data, loss, verify="never")
    for batch in ga.effective_batches(data, 6, lengths=lengths(12)):
        accumulator.step(batch)
    assert counts == [4, 6, 6, 10, 12, 12]  # one micro-batch ahead, within its effective batch
    assert sorted(data.reads) == list(range(12))
    for k in (0, 6):  # the longest first
        assert data.reads[k : k + 6] == sorted(data.reads[k : k + 6], reverse=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_look_at_small_samples_reads_no_other_twice(workers):
    data = Reading(12)
    accumulator = reading(data, lambda model, micro: ga.Loss.of(model(micro["input_ids"])))
    batch = next(iter(ga.effective_batches(data, 6, lengths=lengths(12), workers=workers)))
    with pytest.warns(ga.CutInvarianceWarning):  # the padding has weight
        accumulator.step(batch)
    smallest = sorted(batch.indices)[:2]
    twice = {k for k in data.reads if workers or data.reads.count(k) > 1}  # here, not in a worker
    assert sorted(twice) == smallest


def test_an_effective_batch_that_is_not_run_is_passed_over():
    data = Reading(6)
    batches = ga.effective_batches(data, 2, lengths=lengths(6), shuffle=False)
    first, second, third = batches
    assert data.reads == []
    found = third.micro_batch(np.array([0, 1]), Collate(pad={"input_ids": -1}))
    assert found["input_ids"][:, 0].tolist() == [5, 4]
    assert second.indices.tolist() == [3, 2]
    found = first.micro_batch(np.array([1]), Collate())
    assert found["input_ids"].tolist() == [[0]]
    assert third.lengths(len).tolist() == [6, 5]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_resumed_run_sees_what_an_unbroken_one_sees(at, known, workers):
    """C9, transformers#5605, diffusers#3467, for each place to stop at."""

    def build():
        return ga.effective_batches(
            range(7), 2, epochs=2, lengths=lengths(7) if known else None, workers=workers
        )

    unbroken = samples(build())
    stopped = build()
    for step, _ in enumerate(stopped, start=1):
        if step == at:
            state = stopped.state_dict()
            break
    resumed = build()
    resumed.load_state_dict(state)
    assert len(resumed) == 8 - at
    assert samples(resumed) == unbroken[at:]


@pytest.mark.parametrize("at", [1, 3, 4, 6, 7])
def test_a_resumed_run_makes_the_steps_that_are_left(at):
    """C9, transformers#5605, diffusers#3467: neither fewer nor more."""
    unbroken = samples(ga.effective_batches(range(5), 2, steps=7))
    stopped = ga.effective_batches(range(5), 2, steps=7)
    for step, _ in enumerate(stopped, start=1):
        if step == at:
            state = stopped.state_dict()
            break
    resumed = ga.effective_batches(range(5), 2, steps=7)
    resumed.load_state_dict(state)
    assert len(resumed) == 7 - at
    assert samples(resumed) == unbroken[at:]


@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"steps": 5}])
def test_a_loop_that_was_left_early_begins_its_epoch_anew(options):
    batches = ga.effective_batches(range(6), 2, **options)
    expected = samples(ga.effective_batches(range(6), 2, **options))
    next(iter(batches))  # a look at the first one loses nothing
    assert samples(batches) == expected


@pytest.mark.parametrize("state", [{}, None, {"size": 2, "seed": 0}])
def test_what_is_no_state(state):
    with pytest.raises(ArgumentError, match="returned"):
        ga.effective_batches(range(6), 2).load_state_dict(state)


@pytest.mark.parametrize(
    "other",
    [
        ga.effective_batches(range(5), 2),
        ga.effective_batches(range(6), 2, shuffle=False),
        ga.effective_batches(range(6), 2, last="drop"),
        ga.effective_batches(range(6), 2, steps=4),
    ],
)
def test_a_state_of_other_effective_batches_is_refused(other):
    state = ga.effective_batches(range(6), 2).state_dict()
    with pytest.raises(ArgumentError, match="to go on from this state"):
        other.load_state_dict(state)


def test_a_loader_is_no_dataset():
    with pytest.raises(ArgumentError, match=r"Pass loader\.dataset"):
        ga.effective_batches(torch.utils.data.DataLoader(range(6)), 2)


def test_an_effective_batch_can_be_looked_at():
    (batch,) = ga.effective_batches(range(3), 4, shuffle=False)
    assert list(batch) == [0, 1, 2]
    assert repr(batch) == "<effective batch of 3 samples>"
    assert "of 4 of 3 samples" in repr(ga.effective_batches(range(3), 4))


def test_resuming_an_iterable():
    stopped = ga.effective_batches(Sharded(7), 2)
    next(iter(stopped))
    resumed = ga.effective_batches(Sharded(7), 2)
    resumed.load_state_dict(stopped.state_dict())
    assert samples(resumed) == [[2, 3], [4, 5], [6]]


def test_a_state_of_another_seed():
    state = ga.effective_batches(range(6), 2).state_dict()
    with pytest.raises(ArgumentError, match="seed=0"):
        ga.effective_batches(range(6), 2, seed=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        (range(3), {"size": 0}, "size=0"),
        (range(3), {"epochs": 0}, "epochs"),
        (range(3), {"steps": -1}, "steps"),
        (range(3), {"last": "maybe"}, "'maybe'"),
        (range(3), {"lengths": [1, 2]}, "one length for each of 3"),
        (range(3), {"lengths": [1, -2, 3]}, r"lengths\[1\]"),
        (Sharded(3), {"lengths": [1, 2, 3]}, "Sharded"),
        (iter([1]), {"workers": 2}, "2 workers for a list_iterator"),
        ({"x": [1]}, {}, "dict"),
        ("text", {}, "str"),
        (5, {}, "int"),
    ],
)
def test_arguments_that_make_no_sense(source, options, told):
    with pytest.raises(ArgumentError, match=told):
        ga.effective_batches(source, **({"size": 2} | options))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_sample_at_all(workers):
    with pytest.raises(DataError, match="an empty dataset"):
        ga.effective_batches([], 2)
    with pytest.raises(DataError, match="at least one sample"):
        list(ga.effective_batches(Sharded(0), 2, workers=workers))
