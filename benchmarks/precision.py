"""Sums of 16-bit gradients: what is lost, against a float64 sum of the same micro-gradients.

A small GPT (two layers of 64) with parameters of 16 bits, a micro-batch of two rows at a time. The
accumulator's sums are float32 by default; plain ones, in the parameters' dtype, are what autograd
makes by itself, and are had by ``sum_dtype``.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import run_case, table, verdict

COUNTS = (16, 128, 1024)
TARGET = 1e-6


def measure(*, quick: bool) -> dict[str, Any]:
    """Run the cases, each in its own process."""
    settings = {"counts": COUNTS[:1] if quick else COUNTS}
    cases = ("bfloat16", "float16")
    return {
        "settings": settings,
        "results": [run_case("precision", case, **settings) for case in cases],
    }


def run(case: str, *, counts: list[int]) -> dict[str, Any]:
    """Sum the same micro-gradients in three dtypes."""
    import torch

    dtype = getattr(torch, case)
    errors = {
        name: {count: _error(dtype, sums, count) for count in counts}
        for name, sums in (("float32", torch.float32), (case, dtype))
    }
    return {"errors": errors}


def _error(dtype: Any, sums: Any, count: int) -> float:
    """Return the error of the sums before the last micro-batch closes the effective batch."""
    import torch

    import gradaccum as ga
    from benchmarks.models import gpt

    torch.manual_seed(0)
    model = gpt(vocabulary=128, max_length=16, width=64, layers=2).to(dtype)
    parameters = list(model.parameters())
    accumulator = ga.accumulator(
        model, torch.optim.SGD(parameters, lr=0.0), sum_dtype=sums, nonfinite="skip_step"
    )
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    rows = torch.randint(1, 128, (count + 1, 2, 16))
    for k, ids in enumerate(accumulator.over(rows, steps=count + 1)):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = ga.losses.causal_cross_entropy(logits.float(), ids)
        if k == count:
            found = [p.grad.double() for p in parameters if p.grad is not None]
        else:
            alone = torch.autograd.grad(loss.sum, parameters, retain_graph=True)
            for total, gradient in zip(exact, alone, strict=True):
                total.add_(gradient)
        accumulator.backward(loss)
    off = sum((f - e).square().sum() for f, e in zip(found, exact, strict=True))
    return float((off / sum(e.square().sum() for e in exact)).sqrt())


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    rows, worst = [], 0.0
    for found in result["results"]:
        if "failed" in found:
            return ["Failed."]
        for sums, errors in found["errors"].items():
            rows.append([found["case"], sums, *(f"{error:.1e}" for error in errors.values())])
        worst = max(worst, *found["errors"]["float32"].values())
    counts = list(result["results"][0]["errors"]["float32"])
    return [
        "Relative error of gradient sums, over all parameters together.",
        "",
        *table(["parameters", "sums", *(f"{count} micro-batches" for count in counts)], rows),
        "",
        f"- Target: below 1e-6 with sums of float32. Measured at most {worst:.1e}: "
        f"{verdict(worst, TARGET, at_least=False)}.",
    ]
