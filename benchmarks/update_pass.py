"""The update alone: gradient sums are there, parameters are to be moved.

Compared, on a transformer's worth of parameters: gradaccum's norm pass and update with a fused
AdamW, against what a loop by hand does: divide the gradients, ``clip_grad_norm_``, AdamW with
``foreach``. Further optimizers are there for information, by hand and through gradaccum.

Why it is fair: all make the same update from the same gradients, which are put back before every
run outside of the time; they alternate in one process. All of them clip.
"""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from benchmarks.harness import run_case, spread, table, told, verdict

MAX_GRAD_NORM, WEIGHT = 1.0, 4096.0
BASE, OURS, TARGET = "by hand, foreach", "gradaccum, fused", 3.0
OPTIMIZERS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "default": {},
}


def measure(*, quick: bool) -> dict[str, Any]:
    """Run the case in its own process."""
    sizes = {"layers": 1, "repeats": 3} if quick else {"layers": 12, "repeats": 40}
    return {"settings": sizes, "result": run_case("update_pass", "update", **sizes)}


def run(case: str, *, layers: int, repeats: int) -> dict[str, Any]:
    """Time all ways in turn, `repeats` times."""
    ways = {
        f"{who}, {name}": make(_parameters(layers), options)
        for name, options in OPTIMIZERS.items()
        for who, make in (("by hand", _by_hand), ("gradaccum", _gradaccum))
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 3):
        for name, (restore, update) in ways.items():
            restore()
            begun = perf_counter()
            update()
            if repeat >= 3:
                seconds[name].append(perf_counter() - begun)
    pairs = {
        name: [base / mine for base, mine in zip(seconds[BASE], found, strict=True)]
        for name, found in seconds.items()
    }
    return {
        "parameters": sum(p.numel() for p in _parameters(layers)),
        "milliseconds": {name: median(found) * 1e3 for name, found in seconds.items()},
        "times_faster": {name: spread(found) for name, found in pairs.items()},
    }


Way = tuple[Callable[[], None], Callable[[], None]]
"""Puts the gradients back; makes the update."""


def _by_hand(parameters: list[Parameter], options: dict[str, bool]) -> Way:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)

    def update() -> None:
        torch._foreach_div_([p.grad for p in parameters], WEIGHT)
        clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()

    return _restorer(parameters), update


def _gradaccum(parameters: list[Parameter], options: dict[str, bool]) -> Way:
    from gradaccum.update import Update

    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)
    whole = Update(optimizers=(optimizer,), max_grad_norm=MAX_GRAD_NORM)

    def update() -> None:
        sums = [[p.grad for p in parameters]]
        norms = whole.norms(sums).tolist()
        whole(sums, scales=whole.scales(divisor=WEIGHT, norms=norms))

    return _restorer(parameters), update


def _restorer(parameters: list[Parameter]) -> Callable[[], None]:
    sums = [torch.randn_like(parameter) * WEIGHT / 1000 for parameter in parameters]
    for parameter, one in zip(parameters, sums, strict=True):
        parameter.grad = one.clone()

    def restore() -> None:
        for parameter, one in zip(parameters, sums, strict=True):
            parameter.grad.copy_(one)

    return restore


def _parameters(layers: int) -> list[Parameter]:
    """Return the parameters of a GPT-2 of width 256 with 2,500 tokens."""
    torch.manual_seed(0)
    layer = [(256, 768), (768,), (256, 256), (256,), (256, 1024), (1024,), (1024, 256)]
    shapes = [(2500, 256), *((*layer, (256,), (256,), (256,), (256,), (256,)) * layers)]
    return [Parameter(torch.randn(shape)) for shape in shapes]


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    found = result["result"]
    if "failed" in found:
        return ["Failed."]
    rows = [
        [name, f"{found['milliseconds'][name]:.1f}", told(found["times_faster"][name])]
        for name in found["milliseconds"]
    ]
    ratio = found["times_faster"][OURS]
    return [
        f"{found['parameters'] / 1e6:.1f} million parameters: divide by the weight, clip, step.",
        "",
        *table(["", "ms", f"times as fast as {BASE}: median (range)"], rows),
        "",
        f"- Target: at least {TARGET:.0f} times as fast as dividing, `clip_grad_norm_` and foreach "
        f"AdamW. Measured {told(ratio)}: {verdict(ratio['median'], TARGET, at_least=True)}.",
    ]
