"""``gradaccum``: commands, and how their errors look."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from gradaccum import __version__
from gradaccum.cli.plan import plan
from gradaccum.cli.train import train
from gradaccum.errors import GradaccumError


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gradaccum {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Train at any effective batch size on the memory you have."""


def app() -> typer.Typer:
    """Build the command line.

    Returns:
        The application.
    """
    commands = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
    commands.callback()(_root)
    commands.command()(train)
    commands.command()(plan)
    return commands


def main() -> None:
    """Run the command line: exit status 2 for what the user can mend, 130 after Ctrl-C."""
    try:
        app()()
    except GradaccumError as error:
        told = Text.assemble(("error", "bold red"), " ", str(error))  # no markup and no emoji in it
        Console(stderr=True).print(told, soft_wrap=True)
        sys.exit(2)
    except SystemExit as ended:
        if ended.code == 130:  # what typer makes of Ctrl-C, without a word
            Console(stderr=True).print("interrupted")
        raise
