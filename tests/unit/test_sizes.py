import numpy as np
import pytest

import gradaccum as ga
from gradaccum.errors import ArgumentError
from gradaccum.sizes import Progress, Sizes, parsed_sizes


def sizes(size, **options):
    return ga.effective_batches(range(10), size, **options)._sizes


@pytest.mark.parametrize(
    ("options", "call", "expected", "got"),
    [
        ({"size": 0}, "size=0", "or a mapping", "got 0"),
        ({"size": True}, "size=True", "whole number", "got True"),
        ({"size": 2.0}, "size=2.0", "whole number", "got 2.0"),
        ({"size": "64,1000:256"}, "size='64,1000:256'", "or a mapping", "'64,1000:256'"),
        ({"size": None}, "size=None", "or a function", "got None"),
        ({"size": {}}, "size={...}", "the key 0", "an empty mapping"),
        ({"size": {5: 2, 3: 1}}, "size={...}", "the key 0", "a first key of 3"),
        ({"size": {0: 2, 3: 0}}, "size={3: 0}", "sizes of at least 1", "3: 0"),
        ({"size": {0: True}}, "size={0: True}", "sizes of at least 1", "0: True"),
        ({"size": {False: 2}}, "size={False: 2}", "whole counts", "False: 2"),
        ({"size": {0: 2, 1.5: 3}}, "size={1.5: 3}", "whole counts", "1.5: 3"),
        ({"size": {0: 2, -1: 3}}, "size={-1: 3}", "counts of at least 0", "-1: 3"),
        ({"size": {0: 2, "9": 3}}, "size={'9': 3}", "whole counts", "'9': 3"),
        ({"size": {0: 2.5}}, "size={0: 2.5}", "whole sizes", "0: 2.5"),
        ({"size": lambda p: 0}, "size(Progress(steps=0", "at least 1", "got 0"),
        ({"size": lambda p: 2.0}, "size(Progress(steps=0", "whole number", "got 2.0"),
        ({"size": lambda p: None}, "size(Progress(steps=0", "whole number", "got None"),
        ({"size": {0: 2}, "size_by": "epochs"}, "size_by='epochs'", "'steps' or", "'epochs'"),
        ({"size": 2, "size_by": "samples"}, "size_by='samples'", "a mapping", "size=2"),
        (
            {"size": lambda p: 2, "size_by": "tokens", "lengths": [1] * 10},
            "size_by='tokens'",
            "a mapping",
            "size=a function",
        ),
        ({"size": {0: 2}, "size_by": "tokens"}, 'size_by="tokens"', "lengths=... beside", "none"),
        ({"size": 2, "lr_rule": "square"}, "lr_rule='square'", "'none' or 'linear'", "'square'"),
    ],
)
def test_what_is_no_size(options, call, expected, got):
    with pytest.raises(ArgumentError) as caught:
        ga.effective_batches(range(10), **options)
    assert call in caught.value.call
    assert expected in caught.value.expected
    assert got in f"got {caught.value.got}"
    assert caught.value.remedy.endswith(".")


def test_a_function_is_asked_before_any_work():
    with pytest.raises(ArgumentError, match="got -1"):
        Sizes.of(lambda p: -1, by="steps", lr_rule="none", lengths_known=False)


def test_sizes_by_each_count():
    now = Progress(steps=10, samples=200, tokens=3_000)
    for by, count in (("steps", 10), ("samples", 200), ("tokens", 3_000)):
        options = {"size_by": by, "lengths": [1] * 10}
        assert sizes({count: 7, 0: 2, count + 1: 9}, **options).size_at(now) == 7
        assert sizes({0: 2, count + 1: 9}, **options).size_at(now) == 2
    assert sizes(lambda p: p.steps + p.samples + p.tokens + 1).size_at(now) == 3_211
    assert sizes({np.int64(0): np.int32(4)}).size_at(now) == 4


def test_a_progress_cannot_be_changed():
    with pytest.raises(AttributeError):
        Progress().steps = 3
    assert not hasattr(Progress(), "__dict__")


@pytest.mark.parametrize(
    ("size", "options", "text"),
    [
        (64, {}, "64"),
        ({0: 64}, {"size_by": "samples"}, "64"),
        ({1000: 256, 0: 64}, {}, "64,1000:256 by steps"),
        ({0: 8, 5: 9}, {"size_by": "samples"}, "8,5:9 by samples"),
        (lambda p: 3, {}, "a function"),
    ],
)
def test_sizes_as_text(size, options, text):
    assert str(sizes(size, **options)) == text


def test_when_a_size_moves_no_more():
    assert sizes(3).settled(Progress())
    assert not sizes({0: 3, 4: 2}).settled(Progress(steps=3, samples=9))
    assert sizes({0: 3, 4: 2}).settled(Progress(steps=4))
    assert not sizes(lambda p: 3).settled(Progress(steps=9))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", 64),
        (64, 64),
        (" 64 ", 64),
        ("64,1000:256", {0: 64, 1000: 256}),
        ("8, 10 : 16, 20:4", {0: 8, 10: 16, 20: 4}),
    ],
)
def test_the_spelling_of_the_command_line(text, expected):
    assert parsed_sizes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", 0, -1, True, 2.0, "x", None),
        *("64,", "64,1000", "64,0:8", "64,9:8,9:7", "64,9:8,5:7", "64,10:0", "0,10:4"),
        *("0:64,10:4", "64,10:4:3", "64;10:4", "6 4"),
    ],
)
def test_what_is_spelled_in_another_way(text):
    with pytest.raises(ArgumentError, match="64,1000:256"):
        parsed_sizes(text)
