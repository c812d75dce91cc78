"""The command line."""

from gradaccum.cli.app import main

__all__ = ["main"]
