"""A live display of training: where it is, how fast, and what the last step did."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gradaccum.outcome import StepReport
from gradaccum.units import count, duration, share

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Reports = dict[str, StepReport]

_LINE_SECONDS = 10.0  # between lines where there is no terminal to draw on


class Reporting(Protocol):
    """What has the report of the last step, such as an accumulator."""

    @property
    def report(self) -> StepReport | None:
        """The last report."""


def track(
    batches: Iterable[T],
    accumulator: Reporting | Mapping[str, Reporting] | None = None,
    *,
    total: int | None = None,
    console: "Console | None" = None,
) -> Iterator[T]:
    """Iterate with a progress display; in a terminal a live one, elsewhere a line now and then.

    Args:
        batches: Any iterable; effective batches, as a rule.
        accumulator: Its last report is shown beside the bar; or several by name, which each step
            on every effective batch: the loss of each is shown.
        total: How many there are; by default ``len(batches)``, if it has a length.
        console: Where to draw; by default the terminal.

    Yields:
        The items of `batches`.
    """
    from rich.console import Console  # here: rich costs time at import

    console = console or Console()
    total = _length(batches) if total is None else total
    display = _Live(console, total) if console.is_terminal else _Lines(console, total)
    pace = _Pace()
    with display:
        shown: Reports = {}
        for done, item in enumerate(batches, start=1):
            went_on = False
            try:
                yield item
                went_on = True
            finally:
                reports = _reports(accumulator)
                if went_on or reports != shown:  # on a break: the step before it, if any
                    display.show(done, _facts(reports, pace))
                    shown = reports


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # has a length for some datasets only
        return None


def _reports(accumulator: Reporting | Mapping[str, Reporting] | None) -> Reports:
    """Return the last reports by name; the name of a lone one is that of its loss."""
    if accumulator is None:
        return {}
    each = accumulator if isinstance(accumulator, Mapping) else {"": accumulator}
    reports = {name or "loss": one.report for name, one in each.items()}
    return {name: report for name, report in reports.items() if report is not None}


class _Pace:
    """Tokens per second over the last steps, real tokens only; samples where none are known."""

    def __init__(self) -> None:
        self._seen: deque[Reports] = deque(maxlen=10)
        self.samples = 0

    def of(self, reports: Reports) -> str:
        if not self._seen or self._seen[-1] != reports:
            self._seen.append(reports)
            self.samples += _last(reports).samples
        every = [report for seen in self._seen for report in seen.values()]
        seconds = sum(report.seconds for report in every) or 1e-9
        batches = [_last(seen) for seen in self._seen]  # each has the samples of its batch
        if tokens := sum(report.tokens for report in batches):
            return f"{count(tokens / seconds)} tokens/s"
        return f"{count(sum(report.samples for report in batches) / seconds)} samples/s"


def _last(reports: Reports) -> StepReport:
    return list(reports.values())[-1]


def _facts(reports: Reports, pace: _Pace) -> list[str]:
    if not reports:
        return []
    rate, last = pace.of(reports), _last(reports)
    facts = [
        *(f"{name} {report.loss:.4f}" for name, report in reports.items()),
        f"lr {last.lr:.2e}",
        rate,
        f"{count(pace.samples)} samples",
        f"{max(report.micro_batches for report in reports.values())} micro-batches",
    ]
    if last.padded_tokens:
        facts.append(f"{share(last.padding)} padding")
    outcomes = {report.outcome: None for report in reports.values()}
    return [*facts, *(str(outcome) for outcome in outcomes if not outcome.stepped)]


class _Live:
    """A bar with the time left, and a line of facts under it."""

    def __init__(self, console: "Console", total: int | None) -> None:
        from rich.progress import (  # here: rich costs time at import
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column
        from rich.text import Text

        class TwoLines(Progress):
            """The bar, and the facts under it."""

            def get_renderables(self) -> Iterator[Any]:
                yield self.make_tasks_table(self.tasks)
                for task in self.tasks:
                    facts = f"  {task.fields['facts']}"
                    yield Text(facts, style="dim", no_wrap=True, overflow="ellipsis")

        self._bar = TwoLines(
            TextColumn("optimizer step"),
            BarColumn(table_column=Column(ratio=1), bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            speed_estimate_period=120,
        )
        self._task = self._bar.add_task("", total=total, facts="first step ...")

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: int, facts: list[str]) -> None:
        self._bar.update(self._task, completed=done, facts="  ".join(facts))


class _Lines:
    """A plain line every few seconds, and one at the end."""

    def __init__(self, console: "Console", total: int | None) -> None:
        self._console, self._total = console, total
        self._started = self._last = monotonic()
        self._line = self._shown = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._line != self._shown:
            self._print()

    def show(self, done: int, facts: list[str]) -> None:
        now = monotonic()
        where = f"{done}/{self._total}" if self._total else str(done)
        left = ""
        if self._total:
            remaining = (now - self._started) / done * (self._total - done)
            left = f"  {duration(remaining)} left"
        self._line = f"optimizer step {where}  {'  '.join(facts)}{left}"
        if now - self._last >= _LINE_SECONDS:
            self._last = now
            self._print()

    def _print(self) -> None:
        self._shown = self._line
        self._console.print(self._line, highlight=False, soft_wrap=True)
