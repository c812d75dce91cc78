"""A user's own texts: a file, a folder or a glob pattern."""

import glob
import os
from pathlib import Path
from shlex import quote

from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.text.plain import CODE_SUFFIXES, PROSE_SUFFIXES, read_plain
from gradaccum.recipes.text.tables import TABLE_SUFFIXES, read_table

# Not .json: in a folder it is a settings file more often than a data set.
_FOLDER_SUFFIXES = (PROSE_SUFFIXES | CODE_SUFFIXES | TABLE_SUFFIXES) - {".json"}


def read_texts(source: str | Path, *, text_field: str | None = None) -> list[str]:
    """Read the texts in a file, in a folder with its subfolders, or in what a pattern matches.

    What makes one text depends on the suffix:

    - a row in ``.csv`` and ``.parquet``, a line in ``.jsonl``;
    - the whole file in source code (``.py``, ``.c``, ``.rs`` and so on), where a blank line
      does not end a thought;
    - a paragraph, ended by a blank line, in every other text file.

    Of a folder, the files with a known suffix are read, except hidden ones. Of a pattern
    (``**`` crosses folders), every file that matches is read. Files come in the order of their
    paths. Blank texts are left out, and nothing is written next to the data.

    Args:
        source: A path or a glob pattern.
        text_field: The column or key with the text in tables. If None it is ``"text"``, or
            else the only one that holds strings.

    Returns:
        The texts, one or more.

    Raises:
        DataError: The source is not there, has no text in it, or is no readable text; the
            error names the file, and the line or row.
        ArgumentError: ``text_field`` is given but no file is a table.
    """
    call = f"--data {quote(str(source))}"
    paths = _find(source, call)
    if text_field is not None and not any(_is_table(path) for path in paths):
        raise ArgumentError(
            f"{call} --text-field {quote(text_field)}",
            expected="a table (.jsonl, .csv or .parquet)",
            got="plain text files only, which have no fields",
            remedy="Leave --text-field out.",
        )
    texts: list[str] = []
    for path in paths:
        found = read_table(path, text_field) if _is_table(path) else read_plain(path)
        texts += (text for text in found if text.strip())
    if not texts:
        raise DataError(
            call,
            expected="at least one text",
            got=f"nothing but white space in {_count(paths)}",
            remedy="Pass a source with text in it.",
        )
    return texts


def _count(paths: list[Path]) -> str:
    return "the file" if len(paths) == 1 else f"all {len(paths)} files"


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLE_SUFFIXES


def _find(source: str | Path, call: str) -> list[Path]:
    # The files that a source means, one or more.
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir() and source != "":  # Path("") is the current folder: nobody has named it
        paths = _walk(path)
        expected = "text (.txt, .md, .rst), source code, .jsonl, .csv or .parquet in the folder"
        remedy = "Add such files, or name others with a pattern such as 'folder/*'."
    elif glob.has_magic(str(source)):
        matches = sorted(map(Path, glob.glob(str(source), recursive=True)))
        paths = [match for match in matches if match.is_file()]
        expected, remedy = "a pattern that matches files", "Correct the pattern."
    else:
        paths = []
        expected, remedy = "a file, a folder or a glob pattern", "Correct the path."
    if not paths:
        raise DataError(call, expected=expected, got="no such file", remedy=remedy)
    return paths


def _walk(root: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in paths if path.suffix.lower() in _FOLDER_SUFFIXES)
