import csv
import json
import shlex
import socket
import sys
import tempfile

import pytest

from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.text.files import read_texts


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_parquet(path, columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def message(source, **options):
    with pytest.raises(DataError) as caught:
        read_texts(source, **options)
    return str(caught.value)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    def connect(*arguments):
        raise AssertionError(f"a connection to {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", connect)


# One file


def test_prose_is_cut_at_blank_lines(tmp_path):
    path = write(tmp_path / "a.txt", "\n\none\nstill one\n\n \t\n  two, indented\n\nthree\n")
    assert read_texts(path) == ["one\nstill one", "  two, indented", "three"]
    assert read_texts(str(path)) == read_texts(path)


@pytest.mark.parametrize("name", ["a.md", "a.RST", "README", "a.unknown"])
def test_other_text_files_are_prose(tmp_path, name):
    assert read_texts(write(tmp_path / name, "one\n\ntwo")) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.py", "a.C", "a.rs"])
def test_source_code_is_one_text(tmp_path, name):
    assert read_texts(write(tmp_path / name, "one\n\ntwo\n")) == ["one\n\ntwo\n"]


def test_line_ends_and_byte_order_mark_are_no_text(tmp_path):
    assert read_texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\rmore")) == [
        "one",
        "two\nmore",
    ]
    assert read_texts(write(tmp_path / "a.py", b"one\r\ntwo\r\n")) == ["one\ntwo\n"]


# Tables


def test_json_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", lines({"text": "a\n\nb", "n": 1}, {"text": "é"}) + "\n")
    assert read_texts(path) == ["a\n\nb", "é"]


def test_csv(tmp_path):
    # The names pandas takes for missing values are words, digits in a text field are text.
    path = write(tmp_path / "a.csv", 'id,text\n1,007\n2,NA\n3,"x, ""y""\nz"\n4,\n5,None\n')
    assert read_texts(path) == ["007", "NA", 'x, "y"\nz', "None"]


def test_suffixes_in_capitals(tmp_path):
    write(tmp_path / "A.CSV", "n,body\n1,a\n")
    write(tmp_path / "B.TXT", "b")
    assert read_texts(tmp_path) == ["a", "b"]


def test_a_large_cell(tmp_path):
    limit = csv.field_size_limit()
    assert read_texts(write(tmp_path / "a.csv", "text\n" + "x" * 2 * limit)) == ["x" * 2 * limit]
    assert csv.field_size_limit() == limit


def test_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"n": [1, 2], "text": ["a", "b"]})
    assert read_texts(path) == ["a", "b"]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize(
    ("columns", "text_field", "expected"),
    [
        ({"text": ["a"], "body": ["b"]}, None, ["a"]),
        ({"text": ["a"], "body": ["b"]}, "body", ["b"]),
        ({"n": [1], "body": ["b"]}, None, ["b"]),
    ],
)
def test_the_field(tmp_path, suffix, columns, text_field, expected):
    assert read_texts(table(tmp_path, suffix, columns), text_field=text_field) == expected


def table(folder, suffix, columns):
    rows = list(zip(*columns.values(), strict=True))
    path = folder / f"a{suffix}"
    if suffix == ".parquet":
        return write_parquet(path, columns)
    if suffix == ".csv":
        return write(path, "\n".join(",".join(map(str, row)) for row in [columns, *rows]))
    return write(path, lines(*(dict(zip(columns, row, strict=True)) for row in rows)))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize(
    ("columns", "text_field", "wanted"),
    [
        ({"a": ["x"], "b": ["y"]}, None, "'text' or a single one with strings"),
        ({"a": [1], "b": [2]}, None, "'text' or a single one with strings"),
        ({"a": ["x"], "b": [2]}, "c", "'c'"),
    ],
)
def test_no_field_to_choose_is_an_error(tmp_path, suffix, columns, text_field, wanted):
    path = table(tmp_path, suffix, columns)
    assert message(path, text_field=text_field) == (
        f"--data {path}: expected a field {wanted}, got the fields 'a', 'b'. "
        "Name the one that holds the text: --text-field NAME."
    )


@pytest.mark.parametrize("name", ["a[1].parquet", "a*.parquet", "a b?.parquet"])
def test_a_file_named_like_a_pattern_is_read(tmp_path, name):
    path = write_parquet(tmp_path / name, {"text": ["hello"]})
    assert read_texts(path) == ["hello"]


@pytest.mark.parametrize("texts", [["a"], [None]])
def test_parquet_leaves_nothing_behind(tmp_path, monkeypatch, capfd, texts):
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(cache))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "home"))
    path = write_parquet(tmp_path / "a.parquet", {"text": texts})
    if texts == ["a"]:
        assert read_texts(path) == texts
    else:
        with pytest.raises(DataError):
            read_texts(path)
    assert list(cache.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == sorted([path, cache])
    assert capfd.readouterr() == ("", "")  # no progress bar


def test_blank_texts_are_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", lines({"text": ""}, {"text": " \n"}, {"text": "a"}))
    assert read_texts(path) == ["a"]


# Folders and patterns


def test_a_folder_is_read_in_the_order_of_paths(tmp_path):
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.py", "z")
    write(tmp_path / "a" / "y.jsonl", lines({"body": "y"}))
    write(tmp_path / "a" / "__init__.py", "")  # empty ones are common in code
    write(tmp_path / "c.csv", "text\nc\n")
    write(tmp_path / "picture.png", b"\x89PNG\0")
    write(tmp_path / "package.json", "{")
    write(tmp_path / ".hidden.txt", "hidden")
    write(tmp_path / ".git" / "a.txt", "hidden")
    assert read_texts(tmp_path) == ["y", "z", "b", "c"]


def test_text_field_concerns_the_tables_of_a_folder(tmp_path):
    write(tmp_path / "a.jsonl", lines({"text": "no", "body": "yes"}))
    write(tmp_path / "b.txt", "plain")
    assert read_texts(tmp_path, text_field="body") == ["yes", "plain"]


def test_a_pattern_takes_every_file_that_matches(tmp_path):
    write(tmp_path / "a" / "b" / "1.anything", "one")
    write(tmp_path / "a" / "2.txt", "two")
    write(tmp_path / "a" / "no.md", "no")
    assert read_texts(f"{tmp_path}/a/**/[0-9]*") == ["two", "one"]


# Errors: each names the file, and what to do


def test_nothing_at_the_path(tmp_path):
    path = tmp_path / "no.txt"
    assert message(path) == (
        f"--data {path}: expected a file, a folder or a glob pattern, "
        "got no such file. Correct the path."
    )


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "a")
    monkeypatch.chdir(tmp_path)
    assert read_texts(".") == ["a"]
    assert message("").startswith("--data '': expected a file, a folder or a glob pattern")


def test_a_pattern_without_a_match(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    assert message(f"{tmp_path}/*.txt") == (
        f"--data '{tmp_path}/*.txt': expected a pattern that matches files, "
        "got no such file. Correct the pattern."
    )


def test_a_folder_without_a_known_file(tmp_path):
    write(tmp_path / "picture.png", b"\x89PNG")
    assert message(tmp_path) == (
        f"--data {tmp_path}: expected text (.txt, .md, .rst), source code, .jsonl, "
        ".csv or .parquet in the folder, got no such file. "
        "Add such files, or name others with a pattern such as 'folder/*'."
    )


@pytest.mark.parametrize("name", ["a.txt", "a.py", "a.jsonl", "a.csv"])
@pytest.mark.parametrize("content", ["", " \n\n\t\n"])
def test_an_empty_file(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert message(path) == (
        f"--data {path}: expected at least one text, "
        "got nothing but white space in the file. Pass a source with text in it."
    )


def test_tables_without_rows(tmp_path):
    write(tmp_path / "a.csv", "id,text\n")
    write_parquet(tmp_path / "b.parquet", {"text": []})
    assert "got nothing but white space in all 2 files." in message(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.py", "a.jsonl", "a.csv", "a.bin"])
def test_text_that_is_not_utf8(tmp_path, name):
    path = write(tmp_path / name, "caf\xe9 noir".encode("latin-1"))
    assert message(path) == (
        f"--data {path}: expected UTF-8 text, got byte 0xe9 at offset 3 (invalid "
        "continuation byte). Convert it to UTF-8 (iconv -f ... -t utf-8), or leave the file out."
    )


@pytest.mark.parametrize("name", ["a.txt", "a.py", "a.jsonl", "a.csv", "a.bin"])
def test_binary(tmp_path, name):
    path = write(tmp_path / name, b"\x01\x02\x00\x03")
    assert message(path) == (
        f"--data {path}: expected UTF-8 text, "
        "got a zero byte at offset 2: a binary file. Leave the file out, or convert it to text."
    )


def test_a_broken_file_in_a_folder_is_named(tmp_path):
    write(tmp_path / "a.txt", "fine")
    path = write(tmp_path / "b.txt", b"\xff")
    assert message(tmp_path).startswith(f"--data {path}: expected UTF-8 text")


def test_a_file_that_cannot_be_opened(tmp_path):
    path = tmp_path / "a.txt"
    path.symlink_to(tmp_path / "gone.txt")
    assert message(tmp_path) == (
        f"--data {path}: expected a readable file, got No such file or directory. Check the file."
    )


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ('{"text": "b"', "Expecting ',' delimiter at column 13"),
        ("b", "Expecting value at column 1"),
        ('["b"]', "a value of type list"),
        ("null", "a value of type null"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_broken_line(tmp_path, name, line, got):
    path = write(tmp_path / name, '{"text": "a"}\n\n' + line + "\n")
    assert message(path) == (
        f"--data {path}, line 3: expected a JSON object on each line, such as "
        f'{{"text": "..."}}, got {got}. Correct the line, or write the file as JSON lines.'
    )


@pytest.mark.parametrize(
    ("record", "got"),
    [
        ({"body": "b"}, "no such field"),
        ({"text": None}, "a value of type null"),
        ({"text": 3}, "a value of type int"),
        ({"text": "\ud83d"}, "half of a surrogate pair"),
    ],
)
def test_a_line_without_a_text(tmp_path, record, got):
    path = write(tmp_path / "a.jsonl", lines({"text": "a"}, record))
    assert message(path) == (
        f"--data {path}, line 2: expected a text in the field 'text', got {got}. "
        "Correct or remove the line, or choose another --text-field."
    )


def test_a_row_without_a_text(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", "b", None]})
    assert message(path) == (
        f"--data {path}, row 3: expected a text in the field 'text', "
        "got a value of type null. Correct or remove the row, or choose another --text-field."
    )


def test_a_broken_parquet_file(tmp_path):
    path = write(tmp_path / "a.parquet", "not parquet at all, but long enough")
    text = message(path)
    assert text.startswith(f"--data {path}: expected a .parquet file, got ArrowInvalid")
    assert "\n" not in text
    assert text.endswith("Correct the file.")


@pytest.mark.parametrize("row", ["2,b,c", "2"])
def test_a_row_with_another_number_of_cells(tmp_path, row):
    path = write(tmp_path / "a.csv", f'id,text\n1,"two\nlines"\n\n{row}\n')
    assert message(path) == (
        f"--data {path}, line 5: expected 2 cells, as in the header, "
        f"got {row.count(',') + 1}. "
        'Correct the line; a cell with a comma in it needs quotes: "a, b".'
    )


@pytest.mark.parametrize(
    ("row", "got"),
    [('2,"b\n3,c', "unexpected end of data"), ('2,"b"c', "',' expected after '\"'")],
)
def test_a_row_with_a_broken_quote(tmp_path, row, got):
    path = write(tmp_path / "a.csv", f"id,text\n1,a\n{row}\n")
    limit = csv.field_size_limit()
    assert message(path) == (
        f"--data {path}, line 3: expected a row of a .csv file, got {got}. "
        'Correct its quotes; a quote inside quotes is written twice: "a ""b""".'
    )
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("text_field", ["text", ""])
def test_a_field_of_plain_text_is_an_error(tmp_path, text_field):
    path = write(tmp_path / "a.txt", "a")
    with pytest.raises(ArgumentError) as caught:
        read_texts(path, text_field=text_field)
    assert str(caught.value) == (
        f"--data {path} --text-field {shlex.quote(text_field)}: expected a table (.jsonl, .csv or "
        ".parquet), got plain text files only, which have no fields. Leave --text-field out."
    )


def test_without_datasets_only_parquet_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert read_texts(write(tmp_path / "a.jsonl", lines({"text": "a"}))) == ["a"]
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a"]})
    with pytest.raises(ArgumentError) as caught:
        read_texts(path)
    assert str(caught.value) == (
        f"--data {path}: expected the package datasets, "
        "got an installation without it. Install it: pip install 'gradaccum[recipes]'."
    )


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_table_with_another_separator_is_refused(tmp_path, mark):
    path = write(tmp_path / "a.csv", f"id{mark}text\n0{mark}the cat\n1{mark}the dog\n")
    assert "got the header" in message(path)
    assert "with commas" in message(path)
    assert read_texts(write(tmp_path / "b.csv", f"text\na{mark}b\n")) == [f"a{mark}b"]
