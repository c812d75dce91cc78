"""Run benchmarks by name, or all of them; write their JSON, and the page that shows it."""

import argparse
import importlib
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import environment, report
from benchmarks.harness import write_json

HERE = Path(__file__).parent


def main() -> None:
    """Parse the command line, and run what it names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"{', '.join(report.NAMES)}; by default all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that all works; in quick/"
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, write the page and picture anew"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(report.NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there is {report.NAMES}")

    folder = HERE / "quick" if arguments.quick else HERE
    results = folder / "results"
    if arguments.quick and not arguments.report:
        shutil.rmtree(folder, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    for name in [] if arguments.report else arguments.names or report.NAMES:
        print(name, flush=True)
        begun = perf_counter()
        measured = _measure(name, quick=arguments.quick)
        stamp = environment.stamp() | {"took_seconds": perf_counter() - begun}
        write_json(results / f"{name}.json", {"benchmark": name, **stamp, **measured})
        write_json(results / "environment.json", environment.describe())
    print(report.write(folder))


def _measure(name: str, *, quick: bool) -> dict[str, Any]:
    """Run one benchmark; a failure is a result, and the others go on."""
    try:
        measured: dict[str, Any] = importlib.import_module(f"benchmarks.{name}").measure(
            quick=quick
        )
    except Exception as error:
        print(f"  failed: {error}", flush=True)
        return {"failed": f"{type(error).__name__}: {error}"}
    return measured


if __name__ == "__main__":
    main()
