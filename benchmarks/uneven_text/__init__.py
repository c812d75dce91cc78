"""Training on text of uneven length: gradaccum beside the ways in which others accumulate.

Compared: the same GPT on the same samples (functions of Python's standard library) in the same
effective batches, under the same cap of tokens in a micro-batch, with the same fused AdamW. The
peers take fixed micro-batches in random order, padded with an attention mask by the usual collate
function, each as its documentation recommends; gradaccum cuts by length under the cap. `bound` is
what could be reached at best: the same tokens in full rows without padding.

Why it is fair: every case is a fresh process that runs the same number of optimizer steps; they
alternate in rounds, and ratios are taken within a round. A step is timed from the end of one to
the end of the next, so reading, collating and clipping are in it. What the model was given is
counted by a hook on the model. The first gradient is compared with that of the full batch in
float64, which a script computes that shares no code with gradaccum.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import in_rounds, run_case, spread, table, told, verdict

FULL = {
    "steps": 4,
    "size": 64,
    "micro_batch_size": 8,
    "max_length": 512,
    "width": 256,
    "layers": 4,
    "vocabulary": 4096,
}
QUICK = {
    "steps": 3,
    "size": 16,
    "micro_batch_size": 4,
    "max_length": 128,
    "width": 64,
    "layers": 2,
    "vocabulary": 512,
}
OURS = "gradaccum"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Args:
        title: For people.
        rounds: In how many rounds it takes part; None for all.
        same: Whether its effective batches are those of the other cases.
        exact: Whether its loss is that of the samples, so that gradients can be compared.
    """

    title: str
    rounds: int | None = None
    same: bool = True
    exact: bool = True


CASES = {
    "gradaccum": Case(title="gradaccum"),
    "plain": Case(title="plain PyTorch loop"),
    "accelerate": Case(title="Accelerate, weighted by tokens"),
    "accelerate_accumulate": Case(title="Accelerate, `accumulate()`", rounds=1),
    "fabric": Case(title="Lightning Fabric"),
    "trainer": Case(title="HF Trainer"),
    "trainer_group_by_length": Case(title='HF Trainer, "group_by_length"', same=False),
    "trainer_batch_rebalance": Case(title='HF Trainer, "batch_rebalance"'),
    "trainer_gradaccum_sampler": Case(title="HF Trainer + `ga.EffectiveBatchSampler`"),
    "bound": Case(title="bound: full rows, no padding", exact=False),
}
# Real tokens per second of gradaccum, as a multiple of another case's, at least.
TARGETS = {"trainer": 3.0, "accelerate": 3.0, "bound": 0.9}


def measure(*, quick: bool) -> dict[str, Any]:
    """Run all cases in rounds; return every run, and what they come to."""
    sizes, rounds = (QUICK, 1) if quick else (FULL, 3)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {**sizes, "folder": folder}
        samples = run_case("uneven_text.prepare", "samples", **settings)
        reference = run_case("uneven_text.prepare", "reference", **settings)
        for number, order in enumerate(in_rounds(list(CASES), rounds)):
            for name in order:
                if number < (CASES[name].rounds or rounds):
                    found = run_case("uneven_text.case", name, **settings)
                    runs.append({"round": number, **found})
                    print(f"  round {number + 1}: {_line(found)}", flush=True)
    return {
        "settings": sizes,
        "samples": samples,
        "reference": reference,
        "summary": _summary(runs),
        "runs": runs,
    }


def _line(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"{found['case']} failed: {found['failed'].splitlines()[-1]}"
    return f"{found['case']}: {found['real_tokens_per_second']:,.0f} real tokens/s"


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Bring the rounds of each case together; ratios are taken round by round."""
    ours = {run["round"]: run for run in runs if run["case"] == OURS and "failed" not in run}
    summary: dict[str, Any] = {}
    for name in CASES:
        mine = [run for run in runs if run["case"] == name]
        good = [run for run in mine if "failed" not in run]
        summary[name] = {"runs": len(mine), "failed": len(mine) - len(good)}
        if not good:
            continue
        speed = "real_tokens_per_second"
        summary[name] |= {
            "seconds_per_step": spread([run["seconds_per_step"] for run in good]),
            speed: spread([run[speed] for run in good]),
            "real_share": median(run["real_share"] for run in good),
            "gradient": {
                key: max(run["gradient"][key] for run in good) for key in ("largest", "norm")
            },
        }
        pairs = [ours[run["round"]][speed] / run[speed] for run in good if run["round"] in ours]
        if pairs and name != OURS:
            summary[name]["gradaccum_is_faster_by"] = spread(pairs)
    if ours:
        checks = [run["verify_seconds"] for run in ours.values()]
        summary["verify_seconds"] = spread(checks)
    return summary


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
        "the full batch, as a share of the largest entry. Accelerate's recipe counts the first "
        "label of each sample, which is never predicted; `accumulate()` and Fabric average means "
        "of micro-batches that have different numbers of tokens.",
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
                f"- Target: at least {target} times {CASES[name].title.partition(':')[0]}'s real "
                f"tokens/s. Measured {told(ratio)}: {met}."
            )
    if "verify_seconds" in summary and "seconds_per_step" in summary[OURS]:
        check, step = summary["verify_seconds"], summary[OURS]["seconds_per_step"]["median"]
        lines.append(
            f"- The check of the first effective batch (`verify`) takes {told(check, '.3f')} s "
            f"once; a step takes {step:.2f} s."
        )
    return lines
