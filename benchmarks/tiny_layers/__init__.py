"""Overhead: gradaccum against a hand-written loop, on layers so small that overhead shows.

Compared: samples of equal length, 64 of them in an effective batch, as 8 micro-batches of 8. By
hand: ``(loss / N).backward()``, ``clip_grad_norm_``, ``optimizer.step()``, ``zero_grad()``. With
gradaccum: ``accumulator.step(batch)``, and ``accumulator.over(...)`` around one's own loop.

Why it is fair: both sides have the same data path, as the name of each case says; the same loss
function, which sums; twins of one model and of one optimizer. They take turns in one process, ten
steps each; a ratio is that of the median steps of one turn. gradaccum also hands back the mean
loss and the gradient norm of every step; the loop by hand keeps neither. How much is noise is
shown by the loop by hand against itself.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import in_rounds, run_case, spread, table, told, verdict

MODELS = {"mlp": "MLP, 20 layers of 32", "transformer": "transformer, 2 layers of 32, 16 tokens"}
FORMS = {
    "samples": "`step`, from a dataset of samples",
    "rows": "`step`, from a collated effective batch",
    "micro_batches": "`over`, from collated micro-batches",
    "loader": "`over`, from a DataLoader",
    "itself": "by hand against itself",
}
OPTIMIZERS = {"fused": "AdamW, fused", "default": "AdamW"}
TARGET = 1.0


def measure(*, quick: bool) -> dict[str, Any]:
    """Run each case in its own process; in each, the two sides alternate."""
    sizes = {"turns": 3, "steps": 3} if quick else {"turns": 21, "steps": 10}
    cases = [f"{m} {form} {o}" for m in MODELS for form in FORMS for o in OPTIMIZERS]
    runs = []
    for number, order in enumerate(in_rounds(cases, 1)):
        for case in order:
            found = run_case("tiny_layers.case", case, **sizes)
            runs.append({"round": number, **found})
            ratio = found.get("ratio")
            print(f"  {case}: {told(ratio) if ratio else found['failed']}", flush=True)
    return {"settings": sizes, "runs": runs}


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    rows = []
    for run in result["runs"]:
        model, form, optimizer = run["case"].split()
        title = [MODELS[model], FORMS[form], OPTIMIZERS[optimizer]]
        if "failed" in run:
            rows.append([*title, "failed", "", ""])
            continue
        rows.append(
            [
                *title,
                f"{run['by_hand_ms']:.2f}",
                f"{run['gradaccum_ms']:.2f}",
                told(run["ratio"], ".3f"),
            ]
        )
    good = [run for run in result["runs"] if "ratio" in run]
    ratios = [run["ratio"]["median"] for run in good if " itself " not in run["case"]]
    noise = [abs(run["ratio"]["median"] - 1) for run in good if " itself " in run["case"]]
    head = [
        "model",
        "form and data",
        "optimizer",
        "by hand, ms",
        "gradaccum, ms",
        "gradaccum / by hand: median (range)",
    ]
    lines = [
        "64 samples of equal length as 8 micro-batches of 8; milliseconds an optimizer step.",
        "",
        *table(head, rows),
        "",
    ]
    if ratios and noise:
        limit = TARGET + max(noise)
        lines.append(
            f"- Target: a ratio of at most {TARGET:.2f} within noise, which is {max(noise):.3f} "
            f"here. Medians {told(spread(ratios), '.3f')}; within it in "
            f"{sum(ratio <= limit for ratio in ratios)} of {len(ratios)} cases: "
            f"{verdict(max(ratios), limit, at_least=False)}."
        )
    return lines
