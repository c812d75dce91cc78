"""The optional packages of the recipes, imported at the moment they are needed."""

import importlib
from types import ModuleType

from gradaccum.errors import ArgumentError


def import_extra(name: str, *, call: str) -> ModuleType:
    """Import a package of the ``recipes`` extra, or say how to install it.

    Args:
        name: The package: ``"transformers"``, ``"tokenizers"`` or ``"datasets"``.
        call: What the user called, for the error.

    Returns:
        The imported package.

    Raises:
        ArgumentError: The package is not installed.
        ModuleNotFoundError: The package is installed, but lacks a package of its own.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ArgumentError(
            call,
            expected=f"the package {name}",
            got="an installation without it",
            remedy="Install it: pip install 'gradaccum[recipes]'.",
        ) from error
