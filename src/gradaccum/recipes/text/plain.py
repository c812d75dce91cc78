"""Plain text files: prose by paragraph, source code by file."""

import re
from pathlib import Path
from shlex import quote

from gradaccum.errors import DataError

PROSE_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".log"})
# fmt: off
CODE_SUFFIXES = frozenset({
    ".c", ".cc", ".clj", ".cpp", ".cs", ".css", ".cu", ".cuh", ".cxx", ".erl", ".ex", ".go", ".h",
    ".hpp", ".hs", ".html", ".java", ".jl", ".js", ".jsx", ".kt", ".lua", ".m", ".ml", ".php",
    ".pl", ".py", ".pyi", ".pyx", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".toml",
    ".ts", ".tsx", ".yaml", ".yml",
})
# fmt: on
# From one line end over blank lines to the next; what follows keeps its indentation.
_BLANK_LINES = re.compile(r"\n\s*\n")


def read_plain(path: Path) -> list[str]:
    """Read a text file as one text if it is source code, and as its paragraphs if not.

    Args:
        path: The file.

    Returns:
        The texts; blank ones may be among them.
    """
    text = decode(path)
    if path.suffix.lower() in CODE_SUFFIXES:
        return [text]
    return [paragraph.strip("\n") for paragraph in _BLANK_LINES.split(text)]


def decode(path: Path) -> str:
    r"""Read a file as UTF-8 with ``\n`` at the ends of its lines and no byte order mark.

    Args:
        path: The file.

    Returns:
        Its text.

    Raises:
        DataError: It cannot be opened, or is not UTF-8, or has a zero byte in it, which only
            binary files have.
    """
    call = f"--data {quote(str(path))}"
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise DataError(
            call, expected="a readable file", got=str(error.strerror), remedy="Check the file."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            call,
            expected="UTF-8 text",
            got=f"byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason})",
            remedy="Convert it to UTF-8 (iconv -f ... -t utf-8), or leave the file out.",
        ) from error
    if "\0" in text:
        raise DataError(
            call,
            expected="UTF-8 text",
            got=f"a zero byte at offset {data.index(0)}: a binary file",
            remedy="Leave the file out, or convert it to text.",
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
