"""The frontier of a plan: time of an optimizer step against peak memory."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from gradaccum.frontier import Point
from gradaccum.planner import Plan
from gradaccum.units import binary, duration, share

# Of Okabe and Ito's palette, which colour-blind people can tell apart; markers differ besides.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
_MARKERS = ("o", "s", "^", "D")
_INK, _FAINT = "#222222", "#666666"


def parts_table(plan: Plan) -> Table:
    """Return what the peak is made of, as a table.

    Args:
        plan: The plan.

    Returns:
        Bytes by part, for the largest micro-batch of the chosen point.
    """
    table = Table(title="predicted peak", title_justify="left", box=None, padding=(0, 2))
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for name, size in parts(plan).items():
        if size:
            table.add_row(name, binary(size))
    table.add_row(Text("peak", style="bold"), Text(binary(plan.chosen.peak), style="bold"))
    return table


def parts(plan: Plan) -> dict[str, float]:
    """Return what the peak of the chosen point is made of.

    Args:
        plan: The plan.

    Returns:
        Bytes by part; they add up to the peak. Activations are what is there between forward and
        backward; temporaries are the rest, a parameter's new gradient among them.
    """
    needs = {name: float(size) for name, size in plan.needs.parts().items() if name != "update"}
    peaks = plan.curve(plan.chosen.levers).peaks
    above = plan.chosen.peak - plan.needs.rest
    activations = min(peaks.activations(*plan.chosen.largest), above)
    return {**needs, "activations": activations, "temporaries": above - activations}


def caps_table(plan: Plan, lengths: list[int]) -> Table:
    """Return how many samples go into one micro-batch, as a table.

    Args:
        plan: The plan.
        lengths: Lengths to show; ``[1]`` where samples have none.

    Returns:
        A row for each length.
    """
    table = Table(title="largest micro-batch", title_justify="left", box=None, padding=(0, 2))
    if lengths != [1]:
        table.add_column("tokens a sample", justify="right")
    table.add_column("samples", justify="right")
    for length, count in plan.caps(lengths).items():
        row = [f"{count:,}"] if lengths == [1] else [f"{length:,}", f"{count:,}"]
        table.add_row(*row)
    return table


def frontier_tables(plan: Plan) -> Iterator[Table]:
    """Iterate over the frontier, a table for each of the levers.

    Args:
        plan: The plan.

    Yields:
        A row for each point: the chosen one is marked, those that do not fit are dim.
    """
    for name, points in _by_levers(plan):
        table = Table(title=name, title_justify="left", box=None, padding=(0, 2))
        for heading in ("", "peak", "micro-batches", "largest", "real tokens", "time a step"):
            table.add_column(heading, justify="right")
        for point in points:
            chosen, fits = point is plan.chosen, point.limit <= plan.budget.bytes
            table.add_row(
                ">" if chosen else "",
                binary(point.peak),
                f"{point.micro_batches:.1f}",
                _largest(point),
                share(point.real_share),
                told_time(plan, point),
                style="bold" if chosen else "" if fits else "dim",
            )
        yield table


def told_time(plan: Plan, point: Point) -> str:
    """Return the time of an optimizer step, in seconds or relative to the fastest.

    Args:
        plan: The plan.
        point: One of its points.

    Returns:
        A text.
    """
    return duration(point.time) if plan.seconds else f"x {point.time:.2f}"


def as_json(plan: Plan, lengths: list[int]) -> dict[str, Any]:
    """Return a plan as plain JSON values.

    Args:
        plan: The plan.
        lengths: Lengths whose caps are told.

    Returns:
        Bytes, and times in seconds or relative.
    """
    return {
        "budget": plan.budget.bytes,
        "time": "seconds" if plan.seconds else "relative to the fastest",
        "reason": plan.reason,
        "parts": parts(plan),
        "caps": {str(length): count for length, count in plan.caps(lengths).items()},
        "chosen": _plain(plan.chosen),
        "frontier": [_plain(point) for point in plan.points],
    }


def draw(plan: Plan, path: Path) -> None:
    """Draw the frontier.

    Args:
        plan: The plan.
        path: Where the PNG goes.
    """
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    unit, size = ("GiB", 2**30) if plan.chosen.peak > 2**30 else ("MiB", 2**20)
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 11}):
        figure, axes = plt.subplots(figsize=(9, 5), dpi=100)
        for k, (name, points) in enumerate(_by_levers(plan)):
            axes.plot(
                [point.peak / size for point in points],
                [point.time for point in points],
                color=_COLOURS[k % 4],
                marker=_MARKERS[k % 4],
                linestyle="-" if plan.curves[k].sums == plan.curves[0].sums else ":",
                markersize=5,
                linewidth=1.4,
                label=name,
            )
        axes.axvline(plan.budget.bytes / size, color=_FAINT, linewidth=1, linestyle="--")
        axes.annotate(
            f"budget {binary(plan.budget.bytes)}",
            (plan.budget.bytes / size, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            rotation=90,
            ha="left",
            va="center",
            color=_FAINT,
            fontsize=9,
        )
        chosen = plan.chosen
        axes.plot(
            chosen.peak / size,
            chosen.time,
            marker="*",
            markersize=17,
            markerfacecolor="#D55E00",
            markeredgecolor="white",
            linestyle="none",
            label="chosen",
        )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(mpl.ticker.FuncFormatter(_at_two_and_five))
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"peak memory ({unit})")
        told = "seconds an optimizer step" if plan.seconds else "time a step, fastest = 1"
        axes.set_ylabel(told)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left")
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


def _at_two_and_five(value: float, _position: int) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _by_levers(plan: Plan) -> Iterator[tuple[str, list[Point]]]:
    for curve in plan.curves:
        name = str(curve.levers) if str(curve.levers) != "none" else "no lever"
        if curve.sums != plan.curves[0].sums:
            name += f", sums in {curve.sums}"
        same = (curve.levers, curve.sums)
        yield name, [point for point in plan.points if (point.levers, point.sums) == same]


def _largest(point: Point) -> str:
    count, length = point.largest
    return f"{count:,}" if length == 1 else f"{count:,} x {length:,}"


def _plain(point: Point) -> dict[str, Any]:
    return asdict(point) | {"levers": [n for n, on in asdict(point.levers).items() if on]}
