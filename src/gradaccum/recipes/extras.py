"""The optional packages of the recipes, imported at the moment they are needed."""

import importlib
from types import ModuleType

from gradaccum.errors import ArgumentError


def import_extra(name: str, *, call: str, extra: str = "recipes") -> ModuleType:
    """Import a package of an extra, or say how to install it.

    Args:
        name: The package, or a module in it: ``"transformers"``, ``"PIL.Image"``.
        call: What the user called, for the error.
        extra: Brings the package.

    Returns:
        The imported package.

    Raises:
        ArgumentError: The package is not installed.
        ModuleNotFoundError: The package is installed, but lacks a package of its own.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ArgumentError(
            call,
            expected=f"the package {error.name}",
            got="an installation without it",
            remedy=f"Install it: pip install 'gradaccum[{extra}]'.",
        ) from error
