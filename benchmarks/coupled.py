"""Exact BatchNorm: how far gradients are from the full batch's, and what it costs in time.

A ResNet of basic blocks with random weights on random images, 16 of them in an effective batch.
Errors are those of the gradient of all parameters together, in float64, against one plain backward
pass of torch over the 16. Times are of whole steps in float32: plain accumulation, exact, and the
full batch at once take turns in one process, and a ratio is that of one turn.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import run_case, spread, table, told, verdict

IMAGES = 16
SIZES = (16, 8, 4, 2, 1)
TARGET = 1.25


def measure(*, quick: bool) -> dict[str, Any]:
    """Run both parts, each in its own process."""
    sizes = {"side": 64, "turns": 3} if quick else {"side": 128, "turns": 21}
    return {
        "settings": sizes,
        "error": run_case("coupled", "error", **sizes),
        "time": run_case("coupled", "time", **sizes),
    }


def run(case: str, *, side: int, turns: int) -> dict[str, Any]:
    """Run one of the parts."""
    return {"by_size": _errors(side)} if case == "error" else _times(side, turns)


def _errors(side: int) -> dict[int, dict[str, float]]:
    import torch

    torch.set_default_dtype(torch.float64)
    batch = _batch(side)
    model, _ = _built(exact=False, size=1)
    found = _loss(model, batch)
    (found.sum / found.weight).backward()
    full = torch.cat([p.grad.flatten() for p in model.parameters()])
    return {
        size: {
            name: float((_gradient(exact, size, batch) - full).norm() / full.norm())
            for name, exact in (("plain", False), ("exact", True))
        }
        for size in SIZES
    }


def _gradient(exact: bool, size: int, batch: Any) -> Any:
    """Return the gradient of a step: what plain SGD of learning rate 1 takes away."""
    import torch

    model, accumulator = _built(exact=exact, size=size)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    accumulator.step(batch)
    return before - torch.cat([p.detach().flatten() for p in model.parameters()])


def _times(side: int, turns: int) -> dict[str, Any]:
    from time import perf_counter

    batch = _batch(side)
    cases = {"plain": (False, 4), "exact": (True, 4), "full batch": (False, IMAGES)}
    accumulators = {name: _built(exact=e, size=n)[1] for name, (e, n) in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns + 2):
        for name, accumulator in accumulators.items():
            begun = perf_counter()
            accumulator.step(batch)
            if turn >= 2:
                seconds[name].append(perf_counter() - begun)
    return {
        "seconds": {name: spread(taken) for name, taken in seconds.items()},
        "ratio": {
            name: spread([e / p for e, p in zip(seconds["exact"], seconds[name], strict=True)])
            for name in ("plain", "full batch")
        },
    }


def _batch(side: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    return {"x": torch.randn(IMAGES, 3, side, side), "y": torch.randint(10, (IMAGES,))}


def _built(*, exact: bool, size: int) -> tuple[Any, Any]:
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    import gradaccum as ga

    torch.manual_seed(0)
    widths = [16, 32, 64, 128]
    shape = {"embedding_size": 16, "hidden_sizes": widths, "depths": [2] * 4, "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **shape))
    if exact:
        ga.coupled.exact_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accumulator = ga.accumulator(model, optimizer, _loss, micro_batch_size=size, verify="never")
    return model, accumulator


def _loss(model: Any, batch: Any) -> Any:
    import gradaccum as ga

    return ga.losses.cross_entropy(model(batch["x"]).logits, batch["y"])


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    error, time = result["error"], result["time"]
    if "failed" in error or "failed" in time:
        return ["Failed."]
    rows = [
        [size, str(IMAGES // int(size)), f"{found['plain']:.1e}", f"{found['exact']:.1e}"]
        for size, found in error["by_size"].items()
    ]
    ratio = time["ratio"]["plain"]
    return [
        f"A small ResNet on {IMAGES} images of {result['settings']['side']} pixels: relative "
        "error of the gradient against that of the full batch, in float64.",
        "",
        *table(["images in a micro-batch", "micro-batches", "plain", "exact BatchNorm"], rows),
        "",
        "- Target: steps through 4 micro-batches in at most 1.25 times the time of plain "
        f"accumulation. Measured {told(ratio)}: {verdict(ratio['median'], TARGET, at_least=False)}."
        f" Against the full batch at once: {told(time['ratio']['full batch'])}.",
    ]
