"""Tables: one text from each line of a .jsonl file or each row of a .csv or .parquet file."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from shlex import quote

from gradaccum.errors import DataError
from gradaccum.recipes.text.plain import decode
from gradaccum.recipes.text.records import Record, csv_rows, json_lines, kind, parquet_rows

TABLE_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".parquet"})


def read_table(path: Path, text_field: str | None) -> list[str]:
    """Read the texts in one field of a table.

    Args:
        path: The file; its suffix says how to read it.
        text_field: The field. If None it is ``"text"``, or else the only one whose value in the
            first record is a string and no number.

    Returns:
        The texts, blank ones included, in the order of the file. A broken file, a field that is
        not there or not known, or a value that is no text gives a DataError.
    """
    call = f"--data {quote(str(path))}"
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        # Closed: after an error, its traceback would keep the generator and its folder alive.
        with closing(parquet_rows(path, call)) as rows:
            return _column(rows, text_field, "row", call)
    read = csv_rows if suffix == ".csv" else json_lines
    return _column(read(decode(path), call), text_field, "line", call)


def _column(
    records: Iterable[tuple[int, Record]], text_field: str | None, unit: str, call: str
) -> list[str]:
    texts: list[str] = []
    field = ""
    for number, record in records:
        if not texts:
            field = _choose(record, text_field, call)
        text = record.get(field)
        if not isinstance(text, str) or _is_torn(text):
            got = "no such field" if field not in record else f"a value of type {kind(text)}"
            raise DataError(
                f"{call}, {unit} {number}",
                expected=f"a text in the field {field!r}",
                got="half of a surrogate pair" if isinstance(text, str) else got,
                remedy=f"Correct or remove the {unit}, or choose another --text-field.",
            )
        texts.append(text)
    return texts


def _choose(record: Record, text_field: str | None, call: str) -> str:
    wanted = "text" if text_field is None else text_field
    if wanted in record:
        return wanted
    strings = [name for name, value in record.items() if _is_words(value)]
    if text_field is None and len(strings) == 1:
        return strings[0]
    other = " or a single one with strings" if text_field is None else ""
    raise DataError(
        call,
        expected=f"a field {wanted!r}{other}",
        got=f"the fields {', '.join(map(repr, record))}",
        remedy="Name the one that holds the text: --text-field NAME.",
    )


def _is_words(value: object) -> bool:
    """Return whether a value is a string and no number, which .csv does not tell apart."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def _is_torn(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, which JSON can spell."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)
