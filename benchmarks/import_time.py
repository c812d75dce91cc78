"""What ``import gradaccum`` adds to ``import torch``.

Compared in fresh processes, in pairs: the time of ``import torch``, and that of ``import torch``
and then ``import gradaccum``. A process is started once before, so that files are in memory.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import spread, told, verdict

TARGET = 0.2
_SCRIPT = """
from time import perf_counter
begun = perf_counter()
import torch
middle = perf_counter()
{more}
end = perf_counter()
print(end - begun, end - middle)
"""


def measure(*, quick: bool) -> dict[str, Any]:
    """Run pairs of processes; the first pair warms up and does not count."""
    pairs = 2 if quick else 15
    differences, added, alone = [], [], []
    for k in range(pairs + 1):
        without, _ = _seconds("")
        both, after = _seconds("import gradaccum")
        if k:
            alone.append(without)
            differences.append(both - without)
            added.append(after)
    return {
        "settings": {"pairs": pairs},
        "torch_seconds": spread(alone),
        "added_seconds": spread(added),
        "difference_seconds": spread(differences),
        "differences": differences,
    }


def _seconds(more: str) -> tuple[float, float]:
    command = [sys.executable, "-c", _SCRIPT.format(more=more)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    total, after = done.stdout.split()
    return float(total), float(after)


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    difference = result["difference_seconds"]
    return [
        f"`import torch` takes {told(result['torch_seconds'])} s in a fresh process; "
        f"`import gradaccum` after it {told(result['added_seconds'], '.3f')} s.",
        "",
        f"- Target: at most {TARGET} s more than `import torch`. Measured "
        f"{told(difference, '.3f')} s: {verdict(difference['median'], TARGET, at_least=False)}.",
    ]
