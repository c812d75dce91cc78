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
from statistics import median
from typing import Any

from benchmarks.harness import in_rounds, run_case, spread
from benchmarks.uneven_text.cases import CASES, OURS
from benchmarks.uneven_text.page import section

__all__ = ["measure", "section"]

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


def measure(*, quick: bool) -> dict[str, Any]:
    """Run all cases in rounds; return every run, and what they come to."""
    sizes, rounds = (QUICK, 1) if quick else (FULL, 2)
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
