from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradaccum.collate import Collate, collate_function, padded_length, to_device
from gradaccum.errors import ArgumentError, CollateError

Pair = namedtuple("Pair", ["x", "y"])
PAD = {"ids": 9, "inner.ids": 8, "[0]": 7}


@dataclass
class Sample:
    x: torch.Tensor
    y: int


def test_equal_shapes_are_stacked():
    samples = [{"x": torch.full((2,), k), "n": np.ones(3) * k, "y": k, "z": 0.5} for k in (1, 2)]
    micro = Collate()(samples)
    assert micro["x"].tolist() == [[1, 1], [2, 2]]
    assert micro["n"].dtype == torch.float64
    assert micro["y"].tolist() == [1, 2]
    assert micro["z"].tolist() == [0.5, 0.5]


def test_structure_is_kept():
    assert Collate()([Sample(torch.ones(2), 3)] * 2).y.tolist() == [3, 3]
    assert type(Collate()([Pair(1, (2.0, "a"))] * 2)) is Pair
    assert Collate()([Pair(1, (2.0, "a"))] * 2).y[1] == ["a", "a"]
    assert Collate()([(np.float32(1), np.bool_(True), True, None)] * 2)[3] == [None, None]
    assert Collate()([(True,), (False,)])[0].dtype == torch.bool
    assert Collate()([1.5, 2]).tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    ("side", "rows"), [("right", [[1, 2, 3], [4, 9, 9]]), ("left", [[1, 2, 3], [9, 9, 4]])]
)
@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_unequal_lengths_are_padded(side, rows, kind):
    collate = Collate(pad=PAD, side=side)
    assert collate([{"ids": kind([1, 2, 3])}, {"ids": kind([4])}])["ids"].tolist() == rows


def test_nested_leaves_are_padded_by_path():
    collate = Collate(pad=PAD)
    inner = collate([{"inner": {"ids": [1, 2]}}, {"inner": {"ids": [1]}}])["inner"]["ids"]
    assert inner.tolist() == [[1, 2], [1, 8]]
    assert collate([([1, 2],), ([1],)])[0].tolist() == [[1, 2], [1, 7]]


def test_rows_are_padded_along_their_first_dimension():
    found = Collate(pad=PAD)([{"ids": torch.ones(2, 3)}, {"ids": torch.ones(1, 3)}])["ids"]
    assert found.shape == (2, 2, 3)
    assert found[1].tolist() == [[1.0] * 3, [9.0] * 3]


@pytest.mark.parametrize("rows", [[[1, 2], [1.5]], [[], [1.5]], [[1.5], [1, 2]]])
def test_padding_rounds_no_number(rows):
    found = Collate(pad=PAD)([{"ids": row} for row in rows])["ids"]
    for row, padded in zip(rows, found.tolist(), strict=True):
        assert padded == row + [9] * (found.shape[1] - len(row))


def test_an_empty_sample_has_the_type_of_the_others():
    found = Collate(pad=PAD)([{"ids": []}, {"ids": [1, 2]}])["ids"]
    assert found.dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (
            [{"x": [1]}, {"x": [1, 2]}],
            r"'x' of 2 samples.*shapes \(1,\), \(2,\).*pad=\{'x': value\}",
        ),
        ([{"ids": torch.ones(2, 3)}, {"ids": torch.ones(2, 4)}], "differ in the first dimension"),
        ([torch.ones(2), torch.ones(3)], "'the samples' of 2"),
        ([{"x": 1}, {"y": 1}], "container of x and a container of y"),
    ],
)
def test_nothing_is_guessed(samples, told):
    with pytest.raises(CollateError, match=told):
        Collate(pad=PAD)(samples)


def test_a_tokenizer_tells_how_to_pad():
    tokenizer = SimpleNamespace(pad_token_id=50, padding_side="left", pad_token_type_id=3)
    keys = ("input_ids", "attention_mask", "token_type_ids", "labels")
    micro = collate_function(tokenizer)([{key: [1] * n for key in keys} for n in (2, 1)])
    assert [micro[key][1].tolist() for key in keys] == [[50, 1], [0, 1], [3, 1], [-100, 1]]
    tokenizer.pad_token_id = None
    with pytest.raises(ArgumentError, match=r"tokenizer.pad_token = tokenizer.eos_token"):
        collate_function(tokenizer)
    with pytest.raises(ArgumentError, match="pad=int"):
        collate_function(0)


def test_a_batch_encoding_stays_one():
    transformers = pytest.importorskip("transformers")
    samples = [transformers.BatchEncoding({"input_ids": [1, 2][:n]}) for n in (2, 1)]
    micro = collate_function({"input_ids": 0})(samples)
    assert type(micro) is transformers.BatchEncoding
    assert micro.input_ids.tolist() == [[1, 2], [1, 0]]
    assert samples[0]["input_ids"] == [1, 2]
    assert type(to_device(micro, torch.device("meta"))) is transformers.BatchEncoding


def test_padded_length():
    micro = {"a": torch.ones(2, 5), "b": torch.ones(2, 7), "c": torch.ones(2), "d": ["x"]}
    assert padded_length(micro, ("a", "b")) == 7
    assert padded_length(micro, ("a", "c", "d")) == 5
    assert padded_length(micro, ("c", "d", "e")) is None


def test_to_a_device():
    micro = {"x": torch.ones(2), "names": ["a", "b"]}
    assert to_device(micro, torch.device("cpu"))["x"] is micro["x"]
    moved = to_device(micro, torch.device("meta"))
    assert (moved["x"].device.type, moved["names"]) == ("meta", ["a", "b"])
