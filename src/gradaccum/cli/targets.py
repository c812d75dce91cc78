"""From what was typed after a command to a recipe and its settings."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradaccum.errors import ArgumentError
from gradaccum.recipes.recipe import Recipe
from gradaccum.recipes.settings import Settings, nearest, read_toml, settings

RECIPES = ("gpt", "bert", "gan")
PATHS = ("data", "tokenizer", "model")

Build = Callable[[Settings], Recipe]


def resolve(target: str, told: dict[str, Any], *, command: str = "train") -> tuple[Build, Settings]:
    """Find a recipe and its settings.

    Args:
        target: Name of a recipe, path of a TOML file, or ``module:factory``.
        told: What the command line says; it wins over the file.
        command: For messages.

    Returns:
        The function that builds the recipe, and the settings.

    Raises:
        ArgumentError: There is no such recipe, or a file names none.
    """
    entries: dict[str, Any] = {}
    unused: frozenset[str] = frozenset()
    call = f"{command} {target}"
    if target.endswith(".toml"):
        entries = read_toml(Path(target))
        target = entries.get("recipe", "")
        if not isinstance(target, str) or not target:
            raise ArgumentError(
                call,
                expected='an entry recipe = "gpt" in the file',
                got=", ".join(entries) or "an empty file",
                remedy="Add one.",
            )
    if ":" in target:
        build, defaults = _imported(target), {}
    elif target in RECIPES:
        module = importlib.import_module(f"gradaccum.recipes.{target}")
        build, defaults, unused = module.build, module.DEFAULTS, module.UNUSED
    else:
        raise ArgumentError(
            call,
            expected=f"{', '.join(RECIPES)}, a file that ends in .toml, or module:factory",
            got=repr(target),
            remedy=nearest(target, list(RECIPES)),
        )
    entries.pop("recipe", None)
    told = {key: _whole_path(key, value) if key in PATHS else value for key, value in told.items()}
    defaults = {**defaults, "recipe": target}
    return build, settings(defaults, entries, told, call=call, unused=unused)


def _whole_path(key: str, value: str) -> str:
    """Return a path that holds from any folder, so that a run can be repeated from any.

    Data is always a path or a pattern of paths; a model or a tokenizer that is not there is a
    name on a hub.
    """
    if not value:  # as of an unset variable: not the current folder
        return value
    path = Path(value)
    return str(path.absolute()) if key == "data" or path.exists() else value


def _imported(target: str) -> Build:
    """Import ``module:factory``, looking in the current folder first, as python -m does."""
    module_name, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        found: Build = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            target,
            expected="module:factory, a function that takes Settings and returns a Recipe",
            got=f"{type(error).__name__}: {error}",
            remedy="Run from the folder that holds the module.",
        ) from error
    finally:
        sys.path.remove("")
    return found
