"""The records of a table, each with the number of its line or row, counted from 1."""

import csv
import glob
import io
import json
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from gradaccum.errors import DataError
from gradaccum.recipes.extras import import_extra

Record = Mapping[str, object]


def kind(value: object) -> str:
    """Return the name of a value's type, with JSON's word for None."""
    return "null" if value is None else type(value).__name__


def json_lines(text: str, call: str) -> Iterator[tuple[int, Record]]:
    """Read the objects of a .jsonl file.

    Args:
        text: The content of the file.
        call: What the user called, for the error.

    Yields:
        The number of the line, and the object on it.

    Raises:
        DataError: A line is no JSON object.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            problem = f"a value of type {kind(record)}"
        except json.JSONDecodeError as error:
            record, problem = None, f"{error.msg} at column {error.colno}"
        if not isinstance(record, dict):
            raise DataError(
                f"{call}, line {number}",
                expected='a JSON object on each line, such as {"text": "..."}',
                got=problem,
                remedy="Correct the line, or write the file as JSON lines.",
            )
        yield number, record


def csv_rows(text: str, call: str) -> Iterator[tuple[int, Record]]:
    """Read the rows of a .csv file with commas and a header; every value is a string.

    Not with the package datasets: it guesses types, so that ``007`` becomes 7, ``NA`` becomes
    null, and a column nobody asked for ends the reading where its type changes.

    Args:
        text: The content of the file.
        call: What the user called, for the error.

    Yields:
        The number of the line on which the row starts, and the row.

    Raises:
        DataError: The quotes do not match, or a row has more or fewer cells than the header.
    """
    header: list[str] = []
    for number, cells in _cells(text, call):
        if not header:
            header = cells
            _check_header(header, call)
        elif len(cells) == len(header):
            yield number, dict(zip(header, cells, strict=True))
        else:
            raise DataError(
                f"{call}, line {number}",
                expected=f"{len(header)} cells, as in the header",
                got=str(len(cells)),
                remedy='Correct the line; a cell with a comma in it needs quotes: "a, b".',
            )


def _check_header(header: list[str], call: str) -> None:
    separator = next((mark for mark in ";\t" if mark in header[0]), None)
    if len(header) == 1 and separator is not None:
        raise DataError(
            call,
            expected="cells with commas between them",
            got=f"the header {header[0]!r}, in which {separator!r} seems to stand for the comma",
            remedy="Write the table anew with commas, or as .jsonl.",
        )


def _cells(text: str, call: str) -> list[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows, start = [], 1
    limit = csv.field_size_limit()
    csv.field_size_limit(max(limit, len(text)))  # the default refuses cells above 128 KiB
    try:
        for cells in reader:
            if any(cells):
                rows.append((start, cells))
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{call}, line {start}",
            expected="a row of a .csv file",
            got=str(error),
            remedy='Correct its quotes; a quote inside quotes is written twice: "a ""b""".',
        ) from error
    finally:
        csv.field_size_limit(limit)
    return rows


def parquet_rows(path: Path, call: str) -> Generator[tuple[int, Record], None, None]:
    """Read the rows of a .parquet file.

    Args:
        path: The file.
        call: What the user called, for the error.

    Yields:
        The number of the row, and the row.

    Raises:
        DataError: The file is broken.
    """
    datasets = import_extra("datasets", call=call)
    with tempfile.TemporaryDirectory() as cache:
        try:
            rows = datasets.load_dataset(
                "parquet",
                # Escaped: datasets takes a[1] for a pattern, and then reads no rows at all.
                data_files=glob.escape(str(path.absolute())),
                split="train",
                streaming=True,  # no converted copy on the disk, and no progress bar
                cache_dir=cache,  # its lock files
                batch_size=1_000,  # rows at a time; the default fails on a file without rows
            )
            yield from enumerate(rows, start=1)
        except Exception as error:  # of datasets or pyarrow: each has its own classes
            raise DataError(
                call,
                expected="a .parquet file",
                got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
                remedy="Correct the file.",
            ) from error
