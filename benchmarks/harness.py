"""A process a case, rounds of cases, and what to say about repeated numbers."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

_ROOT = Path(__file__).parent.parent
_LIMIT_SECONDS = 1200
_SILENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}


def write_json(path: Path, value: Any) -> None:
    """Write a value for people and programs."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def run_case(module: str, case: str, **settings: Any) -> dict[str, Any]:
    """Run ``module.run(case, **settings)`` in a new process.

    Args:
        module: Name of a module of this package.
        case: Name of the case.
        settings: Plain JSON values.

    Returns:
        What it returned, with the case's name; if it failed, its error under ``"failed"``.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        write_json(request, {"module": module, "case": case, "settings": settings})
        command = [sys.executable, "-m", "benchmarks.worker", str(request), str(answer)]
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=_ROOT,
                env={**os.environ, **_SILENT},
                capture_output=True,
                text=True,
                timeout=_LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"case": case, "failed": f"not done after {_LIMIT_SECONDS} seconds"}
        if done.returncode or not answer.exists():
            return {"case": case, "failed": done.stderr.strip()[-2000:] or str(done.returncode)}
        return {"case": case, **json.loads(answer.read_text())}


def in_rounds(cases: Sequence[str], rounds: int) -> list[list[str]]:
    """Return the order of the cases in each round: each starts with another one.

    What slows a machine down for a while then meets all cases, and not always the same.
    """
    shift = max(1, len(cases) // max(rounds, 1))
    return [[*cases[k * shift :], *cases[: k * shift]] for k in range(rounds)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the least, the median and the greatest of repeated numbers."""
    return {"min": min(values), "median": median(values), "max": max(values)}


def told(values: dict[str, float], form: str = ".2f") -> str:
    """Return a spread for a table: the median, and the range behind it."""
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


def verdict(value: float, target: float, *, at_least: bool) -> str:
    """Return whether a number meets its target, in words."""
    return "met" if (value >= target if at_least else value <= target) else "**missed**"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; columns after the first are flush right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]
