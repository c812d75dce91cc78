from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from gradaccum.errors import CollateError
from gradaccum.tree import children, leaves, map_leaves, map_with_path

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Graph:
    nodes: object
    label: int
    derived: int = field(default=7, init=False)


class Batch(UserDict):
    """As transformers' BatchEncoding: a mapping that is no dict, with state beside its data."""

    def __init__(self, data, note=None):
        super().__init__(data)
        self.note = note


TREES = [
    3,
    [1, 2, 3],
    {"a": 1, "b": {"c": 2.0}},
    (1, (2, 3)),
    [{"a": 1}, {"a": 2}],
    Pair(1, Pair(2, 3)),
    Graph(nodes={"x": 1}, label=2),
    OrderedDict(a=1, b=2),
    defaultdict(int, a=1),
    Batch({"a": 1}, note="kept"),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_structure_and_type_come_back(tree):
    same = map_leaves(lambda leaf: leaf, tree)
    assert type(same) is type(tree)
    assert same == tree
    assert list(leaves(map_leaves(lambda leaf: [leaf], tree))) == [
        (path, [leaf]) for path, leaf in leaves(tree)
    ]
    assert vars(same).get("note") == "kept" if isinstance(tree, Batch) else True


def test_the_first_tree_is_left_alone():
    for tree in (Batch({"a": 1}), OrderedDict(a=1), {"a": 1}):
        assert map_leaves(lambda leaf: leaf + 1, tree)["a"] == 2
        assert tree["a"] == 1


def test_paths():
    tree = {"x": (1, [{"y": 2}]), "g": Graph(nodes=3, label=Pair(4, 5))}
    paths = ["x[0]", "x[1][0].y", "g.nodes", "g.label.left", "g.label.right"]
    assert [path for path, _ in leaves(tree)] == paths
    assert map_with_path(lambda path, leaf: path, tree)["g"].label == Pair(*paths[3:])
    assert list(leaves(5)) == [("", 5)]


@pytest.mark.parametrize(
    "leaf", [torch.ones(2), [], [1.0, 2.0], [[1], [2, 3]], "text", None, Pair, Graph]
)
def test_leaves_that_are_no_containers(leaf):
    assert children(leaf) is None


def test_several_trees_at_once():
    summed = map_with_path(lambda _, *found: sum(found), {"a": 1, "b": (2,)}, {"b": (20,), "a": 10})
    assert summed == {"a": 11, "b": (22,)}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "container of a, b"),
        ({"a": 1}, 1, "a leaf"),
        (1, {"a": 1}, "a leaf"),
        ((1, 2), (1, 2, 3), "container of 0, 1, 2"),
        ({"x": {"a": 1}}, {"x": {"b": 1}}, "sample at x"),
    ],
)
def test_trees_of_different_structure(one, other, told):
    with pytest.raises(CollateError, match=told):
        map_with_path(lambda _, *found: found, one, other)
