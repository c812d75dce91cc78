"""The folder of a run. Each thing in it is whole, or is not there."""

import json
import os
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from gradaccum.errors import ArgumentError
from gradaccum.recipes.settings import Settings


def choose_folder(out: Path | None, recipe: str, *, under: str = "runs") -> Path:
    """Return where a run is to be written; nothing is made yet.

    Args:
        out: What the user said.
        recipe: Names the folder if the user said nothing.
        under: Where the folder is then.

    Returns:
        The folder, which is empty or not there.

    Raises:
        ArgumentError: It holds something, or cannot be written.
    """
    if out is None:
        name = recipe.replace(":", "-").replace(".", "-")
        return Path(under) / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArgumentError(
            f"--out {out}",
            expected="a new or an empty folder",
            got="a folder that holds something" if out.is_dir() else "a file",
            remedy="Name another one; nothing is ever overwritten.",
        )
    nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not os.access(nearest, os.W_OK):
        raise ArgumentError(
            f"--out {out}",
            expected="a folder that can be written",
            got=f"no right to write in {nearest}",
            remedy="Name another one.",
        )
    return out


def write_config(path: Path, settings: Settings, versions: dict[str, str]) -> None:
    """Write settings so that ``gradaccum train config.toml`` repeats the run.

    Args:
        path: The file.
        settings: Of the run.
        versions: Of what it ran with; they stand in comments.
    """
    lines = [f"# {name} {version}" for name, version in versions.items()]
    for name, value in settings.model_dump(exclude_none=True).items():
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    write_file(path, lambda aside: aside.write_text("\n".join(lines) + "\n", encoding="utf-8"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file.

    Args:
        path: The file.
        value: What it holds.
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Args:
        path: The file.
        text: What it holds.
    """
    write_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder aside, then put it in place.

    Args:
        path: The folder.
        write: Fills a folder.
    """
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        write(aside)
    except BaseException:  # Ctrl-C as well
        shutil.rmtree(aside, ignore_errors=True)
        raise
    aside.rename(path)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file aside, then put it in place. Its folder is made if it is not there.

    Args:
        path: The file.
        write: Writes a file; the path that it gets ends as this one does.
    """
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".partial-{path.name}")
    write(aside)
    aside.replace(path)
