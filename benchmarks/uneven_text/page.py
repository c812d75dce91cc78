"""What the page says about this benchmark."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import table, told, verdict
from benchmarks.uneven_text.cases import CASES, OURS, TARGETS


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    sizes, summary = result["settings"], result["summary"]
    rows = []
    for name, case in CASES.items():
        found = summary[name]
        if "seconds_per_step" not in found:
            rows.append([case.title, "failed", "", "", "", ""])
            continue
        comparable = case.same and case.exact
        rows.append(
            [
                case.title + ("" if case.same else " (*)"),
                f"{found['seconds_per_step']['median']:.2f}" if case.same else "-",
                told(found["real_tokens_per_second"], ",.0f"),
                f"{found['real_share']:.0%}",
                told(found["gradaccum_is_faster_by"]) if "gradaccum_is_faster_by" in found else "",
                f"{found['gradient']['largest']:.1e}" if comparable else "-",
            ]
        )
    lines = [
        f"A GPT with {sizes['layers']} layers of width {sizes['width']}; {sizes['size']} samples "
        f"of up to {sizes['max_length']} tokens make an optimizer step; micro-batches hold at "
        f"most {sizes['micro_batch_size'] * sizes['max_length']:,} tokens. "
        f"{sizes['steps'] - 1} steps after one that warms up, in each round.",
        "",
        *table(
            [
                "",
                "s / optimizer step",
                "real tokens/s: median (range)",
                "real tokens of all computed",
                "gradaccum is faster by",
                "gradient: largest difference",
            ],
            rows,
        ),
        "",
        "Largest difference: of the first optimizer step's gradient from the float64 gradient of "
        "the full batch, as a share of the largest entry. Accelerate's recipe, and the Trainer "
        "with a `GPT2LMHeadModel`, also count the first label of each sample, which is never "
        "predicted; `accumulate()` and Fabric average means of micro-batches that have different "
        "numbers of tokens.",
        "",
        "(*) Puts samples of like length into the same optimizer step: other effective batches, "
        "so other updates.",
        "",
    ]
    for name, target in TARGETS.items():
        if "gradaccum_is_faster_by" in summary[name]:
            ratio = summary[name]["gradaccum_is_faster_by"]
            met = verdict(ratio["median"], target, at_least=True)
            lines.append(
                f"- Target: at least {target} times the real tokens/s of "
                f"{CASES[name].title.partition(':')[0]}. Measured {told(ratio)}: {met}."
            )
    if "verify_seconds" in summary and "seconds_per_step" in summary[OURS]:
        check, step = summary["verify_seconds"], summary[OURS]["seconds_per_step"]["median"]
        lines.append(
            f"- The check of the first effective batch (`verify`) takes {told(check, '.3f')} s "
            f"once; a step takes {step:.2f} s."
        )
    return lines
