"""The command line in this process, and text for it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradaccum.cli import main


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def gradaccum(monkeypatch, capsys) -> Callable[..., Done]:
    """Run in this process, where transformers is imported only once."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["gradaccum", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return call


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Uneven paragraphs: from 2 to 40 words."""
    words = "the cut of a batch does not change the update that it makes"
    words = words.split()
    paragraphs = [" ".join(words[k % 7 :] * (1 + k % 4)) + f" {k}" for k in range(60)]
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text("\n\n".join(paragraphs))
    return path
