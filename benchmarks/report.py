"""The page and the picture, from the JSON of all benchmarks that were run."""

import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks import picture

NAMES = (
    "uneven_text",
    "memory",
    "precision",
    "coupled",
    "tiny_layers",
    "update_pass",
    "partition",
    "import_time",
)
_TITLES = {
    "uneven_text": "Text of uneven length",
    "memory": "Memory",
    "precision": "Sums of 16-bit gradients",
    "coupled": "Exact BatchNorm",
    "tiny_layers": "Overhead on tiny layers",
    "update_pass": "The update pass",
    "partition": "The partition",
    "import_time": "Import time",
}


def write(folder: Path) -> Path:
    """Write ``RESULTS.md`` from the results that are there; return its path."""
    results = folder / "results"
    machine = json.loads((results / "environment.json").read_text())
    lines = ["# Benchmarks", "", *_machine(machine), ""]
    for name in NAMES:
        path = results / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        lines += [f"## {_TITLES[name]}", ""]
        if "failed" in found:
            lines += [f"Failed: {found['failed']}", ""]
            continue
        if name == "uneven_text" and picture.draw(found, results / "uneven_text.png"):
            lines += ["![Where a step's time goes](results/uneven_text.png)", ""]
        lines += importlib.import_module(f"benchmarks.{name}").section(found)
        lines += ["", f"`{name}`, {found['date'][:10]}, commit {found['commit']}.", ""]
    page = folder / "RESULTS.md"
    page.write_text("\n".join(lines).rstrip() + "\n")
    return page


def _machine(machine: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    return [
        "Written by `python -m benchmarks`; each number's origin is in `results/`. Ratios are "
        "taken pair by pair, side by side in time; shown are the median and, in brackets, the "
        "least and the greatest.",
        "",
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} threads, "
        f"{machine['memory_gib']} GiB of memory, {machine['system']}; no accelerator.",
        "",
        f"Python {machine['python']}; {versions}.",
    ]
