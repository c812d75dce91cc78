"""One case in this process: ``python -m benchmarks.worker request.json answer.json``."""

import importlib
import json
import sys
from pathlib import Path

from benchmarks.harness import write_json


def main(request: str, answer: str) -> None:
    """Run the case of a request file, and write what it returns."""
    asked = json.loads(Path(request).read_text())
    module = importlib.import_module(f"benchmarks.{asked['module']}")
    write_json(Path(answer), module.run(asked["case"], **asked["settings"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
