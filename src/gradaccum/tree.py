"""Samples as trees: nested mappings, tuples, lists and dataclasses with tensors at the leaves.

A walk of our own, since registering a container with torch's pytrees is global and cannot be
undone. Containers come back as the type they were; a Hugging Face `BatchEncoding` stays one.
A list of plain numbers, such as token ids, is a leaf.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from numbers import Number
from typing import Any

from gradaccum.errors import CollateError


def children(tree: Any) -> dict[Any, Any] | None:
    """Return a container's children by key, index or field name; None for a leaf."""
    kind = type(tree)
    if kind is dict:  # the usual case first, as this is a hot path
        found: dict[Any, Any] = tree
        return found
    if issubclass(kind, tuple) or (issubclass(kind, list) and not _is_numbers(tree)):
        return dict(enumerate(tree))
    if hasattr(kind, "shape"):  # a tensor or an array, before slower questions
        return None
    if issubclass(kind, Mapping):
        return {key: tree[key] for key in tree}
    if is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in fields(tree) if field.init}
    return None


def _is_numbers(items: list[Any]) -> bool:
    return (
        not items
        or isinstance(items[0], Number)
        or (isinstance(items[0], list) and _is_numbers(items[0]))
    )


def _rebuild(tree: Any, values: dict[Any, Any]) -> Any:
    """Return a container like `tree` with other children."""
    if type(tree) is dict or (isinstance(tree, Mapping) and not isinstance(tree, MutableMapping)):
        return values
    if isinstance(tree, Mapping):
        twin: Any = copy(tree)
        if hasattr(twin, "data"):  # a UserDict's copy may share its data
            twin.data = dict(twin.data)
        for key, value in values.items():
            twin[key] = value
        return twin
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(**dict(zip(tree._fields, values.values(), strict=True)))
    if isinstance(tree, (tuple, list)):
        return type(tree)(values.values())
    return replace(tree, **values)


def _join(path: str, key: Any, tree: Any) -> str:
    if isinstance(tree, (tuple, list)) and not hasattr(tree, "_fields"):
        return f"{path}[{key}]"
    name = tree._fields[key] if hasattr(tree, "_fields") else key
    return f"{path}.{name}" if path else str(name)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to each leaf.

    Args:
        function: Gets a leaf.
        tree: A leaf or a container of trees.

    Returns:
        A tree of the same structure and types.
    """
    if type(tree) is tuple:  # the usual case first, as this is a hot path
        return tuple(map_leaves(function, child) for child in tree)
    found = children(tree)
    if found is None:
        return function(tree)
    return _rebuild(tree, {key: map_leaves(function, child) for key, child in found.items()})


def flat(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order.

    Args:
        tree: A leaf or a container of trees.

    Returns:
        Its leaves.
    """
    if hasattr(tree, "shape"):
        return [tree]
    if type(tree) is tuple:  # the usual cases first, as this is a hot path
        return [leaf for child in tree for leaf in flat(child)]
    found = children(tree)
    if found is None:
        return [tree]
    return [leaf for child in found.values() for leaf in flat(child)]


def map_with_path(function: Callable[..., Any], tree: Any, *others: Any, path: str = "") -> Any:
    """Apply `function` to the path of each leaf and the corresponding leaves of like trees.

    Args:
        function: Gets the path, such as ``"inputs.ids"`` or ``"[0]"``, and a leaf of each tree.
        tree: A leaf or a container of trees.
        others: Trees of the same structure.
        path: Where the trees stand in larger ones.

    Returns:
        A tree of the first tree's structure and types.

    Raises:
        CollateError: The trees differ in structure.
    """
    here = children(tree)
    there = [found for other in others if (found := children(other)) is not None]
    if here is None and not there:
        return function(path, tree, *others)
    if (
        here is None
        or len(there) < len(others)
        or any(other.keys() != here.keys() for other in there)
    ):
        structures = sorted({_told(children(one)) for one in (tree, *others)})
        raise CollateError(
            f"sample{f' at {path}' if path else ''}",
            expected="the same structure in every sample",
            got=" and ".join(structures),
            remedy="Make the dataset return samples with the same keys.",
        )
    values = {
        key: map_with_path(
            function, here[key], *(other[key] for other in there), path=_join(path, key, tree)
        )
        for key in here
    }
    return _rebuild(tree, values)


def _told(found: dict[Any, Any] | None) -> str:
    return "a leaf" if found is None else f"a container of {', '.join(map(str, found))}"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves of a tree, in order.

    Args:
        tree: Any tree.
        path: Where it stands in a larger tree.

    Yields:
        The path, such as ``"inputs.ids"``, and the leaf.
    """
    found = children(tree)
    if found is None:
        yield path, tree
        return
    for key, child in found.items():
        yield from leaves(child, _join(path, key, tree))
