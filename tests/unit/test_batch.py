import weakref

import numpy as np
import pytest
import torch

from gradaccum.batch import (
    Rows,
    Samples,
    common_size,
    default_length,
    effective_batch,
    one_ahead,
    weigh,
)
from gradaccum.collate import Collate
from gradaccum.errors import ArgumentError


def test_a_list_is_samples():
    batch = effective_batch([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert isinstance(batch, Samples)
    assert (len(batch), batch.sample(1)) == (2, {"input_ids": [3]})
    assert batch.lengths(default_length).tolist() == [2, 1]
    assert batch.lengths(lambda sample: None) is None
    micro = batch.micro_batch(np.array([1]), Collate())
    assert micro["input_ids"].tolist() == [[3]]
    assert effective_batch(batch) is batch


@pytest.mark.parametrize(
    "tree", [torch.ones(4, 2), (torch.ones(4), torch.ones(4, 3)), {"x": torch.ones(4, 2)}]
)
def test_collated_tensors_are_rows(tree):
    batch = effective_batch(tree)
    assert isinstance(batch, Rows)
    assert len(batch) == 4
    assert batch.lengths(default_length) is None


@pytest.mark.parametrize("positions", [[0], [1, 2], [3, 1], [0, 2], [2, 2, 1]])
def test_rows_at_positions(positions):
    tree = {"x": torch.arange(4), "y": (torch.arange(8).view(4, 2),)}
    micro = effective_batch(tree).micro_batch(np.array(positions), Collate())
    assert micro["x"].tolist() == positions
    assert micro["y"][0][:, 0].tolist() == [2 * k for k in positions]
    assert effective_batch(tree).sample(2)["y"][0].tolist() == [4, 5]


def test_rows_that_follow_each_other_are_no_copy():
    x = torch.arange(4)
    micro = effective_batch(x).micro_batch(np.array([1, 2]), Collate())
    assert micro.data_ptr() == x[1:].data_ptr()


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ([], "empty list"),
        ([torch.ones(2), torch.ones(2)], "list of bare tensors"),
        ((1, 2), "tuple without a tensor"),
        ("text", "str without a tensor"),
        ({"x": [1, 2]}, "dict without a tensor"),
        ((torch.ones(2), torch.ones(3)), r"\[0\] torch.Size\(\[2\]\)"),
        ({"x": torch.ones(2), "names": "ab"}, "names str"),
        (torch.tensor(1.0), "along"),
    ],
)
def test_what_might_be_either_is_refused(batch, told):
    with pytest.raises(ArgumentError, match=told):
        effective_batch(batch)


def test_the_first_dimension_that_all_leaves_share():
    assert common_size((torch.ones(3, 2), {"y": torch.ones(3)})) == 3
    assert common_size((torch.ones(3), torch.ones(4))) is None
    assert common_size((torch.ones(3), 4)) == 3  # what is no tensor has no say
    assert common_size(("text", 4)) is None
    assert common_size(torch.tensor(1.0)) is None


def test_length_of_input_ids():
    assert default_length({"input_ids": torch.ones(5)}) == 5
    assert default_length({"x": [1]}) is None
    assert default_length((1, 2)) is None


def test_weights_are_summed_by_term():
    batch = effective_batch([{"n": 2}, {"n": 3}])
    assert weigh(batch, lambda sample: sample["n"]) == {"": 5.0}
    assert weigh(batch, lambda sample: {"ce": sample["n"], "aux": 1}) == {"ce": 5.0, "aux": 2.0}
    rows = effective_batch(torch.tensor([2, 3]))
    assert weigh(rows, lambda row: row) == {"": 5.0}


@pytest.mark.parametrize("count", range(4))
def test_the_last_is_known_to_be_the_last(count):
    expected = [(k, k == count - 1) for k in range(count)]
    assert list(one_ahead(iter(range(count)))) == expected


class Item:
    pass


def test_one_ahead_reads_one_ahead_and_holds_nothing_else():
    made = []

    def items():
        for _ in range(4):
            item = Item()
            made.append(weakref.ref(item))
            yield item
            del item

    counts = []
    for item, _ in one_ahead(items()):
        counts.append(len(made))
        place = len(counts) - 1
        assert made[place]() is item
        del item
        assert [ref() is not None for ref in made] == [k == place + 1 for k in range(len(made))]
    assert counts == [2, 3, 4, 4]


def test_what_was_read_ahead_is_handed_out_before_an_error():
    def items():
        yield 1
        yield 2
        raise OSError("gone")

    ahead = one_ahead(items())
    assert [next(ahead), next(ahead)] == [(1, False), (2, False)]
    with pytest.raises(OSError, match="gone"):
        next(ahead)


def test_a_batch_of_one_is_no_sample():
    with pytest.raises(ArgumentError, match=r"got shape \(1, 5\)") as caught:
        default_length({"input_ids": torch.zeros(1, 5)})
    assert "return_tensors" in caught.value.remedy
