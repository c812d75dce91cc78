"""Where reports go: a file with one JSON object a line."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gradaccum.outcome import StepReport


class JsonLines:
    """Appends reports to a file, each at once, so that what was done is on disk.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, report: StepReport, **more: Any) -> None:
        """Append one report.

        Args:
            report: What a step did.
            more: Further entries of the line.
        """
        self._file.write(json.dumps(report.as_dict() | more) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
