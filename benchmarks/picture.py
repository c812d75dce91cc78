"""The picture of `uneven_text`: where the time of an optimizer step goes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of Okabe and Ito's palette, which colour-blind people can tell apart; padding is hatched besides.
_REAL, _PADDING, _INK, _FAINT = "#0072B2", "#F2C879", "#222222", "#666666"
_TITLES = {
    "trainer": "HF Trainer",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "plain": "plain PyTorch loop",
    "trainer_batch_rebalance": "HF Trainer, batch_rebalance",
    "trainer_gradaccum_sampler": "HF Trainer + our sampler",
    "gradaccum": "gradaccum",
    "bound": "bound: no padding at all",
}


def draw(result: Mapping[str, Any], path: Path) -> bool:
    """Draw a bar for each case that trains on the same effective batches.

    Args:
        result: The JSON of `uneven_text`.
        path: Where the picture goes.

    Returns:
        Whether there was anything to draw.
    """
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    found = {
        name: case
        for name in _TITLES
        if "seconds_per_step" in (case := result["summary"].get(name, {}))
    }
    if not found:
        return False
    names = sorted(found, key=lambda name: found[name]["seconds_per_step"]["median"])
    if "bound" in names:
        names = [*(name for name in names if name != "bound"), "bound"]
    seconds = [found[name]["seconds_per_step"]["median"] for name in names]
    real = [s * found[name]["real_share"] for s, name in zip(seconds, names, strict=True)]

    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 11, "hatch.linewidth": 0.8}):
        figure, axes = plt.subplots(figsize=(10, 0.47 * len(names) + 1.15), dpi=100)
        padding = [whole - part for whole, part in zip(seconds, real, strict=True)]
        axes.barh(names, real, color=_REAL, height=0.62)
        axes.barh(
            names,
            padding,
            left=real,
            color=_PADDING,
            height=0.62,
            hatch="///",
            edgecolor="#C98A1B",
            linewidth=0,
        )
        longest = max(seconds)
        if "bound" in names:
            axes.axvline(seconds[-1], color=_FAINT, linestyle=":", linewidth=1.2, zorder=0)
        for row, name in enumerate(names):
            _label(axes, row, found[name], longest, bold=name == "gradaccum")
        row = max(range(len(names)), key=lambda k: padding[k])
        axes.text(real[row] / 2, row, "real tokens", ha="center", va="center", color="white")
        axes.text(
            real[row] + padding[row] / 2,
            row,
            "padding",
            ha="center",
            va="center",
            color=_INK,
            bbox={"facecolor": _PADDING, "edgecolor": "none", "pad": 2.5},
        )
        axes.set_yticks(range(len(names)), [_TITLES[name] for name in names])
        for label, name in zip(axes.get_yticklabels(), names, strict=True):
            label.set_fontweight("bold" if name == "gradaccum" else "normal")
            label.set_color(_FAINT if name == "bound" else _INK)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.36)
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
        figure.suptitle(
            "Seconds per optimizer step, same samples, same effective batch",
            x=0.015,
            horizontalalignment="left",
            fontweight="bold",
            color=_INK,
            fontsize=13,
        )
        figure.tight_layout()
        figure.savefig(path, facecolor="white")
        plt.close(figure)
    return True


def _label(axes: Any, row: int, case: Mapping[str, Any], longest: float, *, bold: bool) -> None:
    seconds = case["seconds_per_step"]["median"]
    speed = case["real_tokens_per_second"]["median"]
    axes.text(
        seconds + longest * 0.012,
        row,
        f"{seconds:.1f} s,  {speed:,.0f} real tokens/s",
        va="center",
        color=_INK,
        fontweight="bold" if bold else "normal",
    )
