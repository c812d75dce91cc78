"""One case: two training loops, which take turns."""

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.harness import spread
from benchmarks.tiny_layers import loops
from benchmarks.tiny_layers.loops import Samples

Loop = Iterator[None]
"""Makes one optimizer step each time it is advanced."""


class Tiny(nn.Module):
    """A transformer with two layers of width 32 that classifies 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of ten classes."""
        return self.head(self.encoder(self.embedding(ids)).mean(1))


def run(case: str, *, turns: int, steps: int) -> dict[str, Any]:
    """Let each side make `steps` steps in turn, `turns` times; a ratio is that of one turn."""
    name, form, optimizer = case.split()
    samples = _samples(name, (turns + 1) * steps)
    by_hand = _loop(f"{form}_by_hand", name, optimizer, samples)
    ours = _loop(f"{form}_gradaccum", name, optimizer, samples)
    seconds: list[tuple[float, float]] = []
    for turn in range(turns + 1):
        if turn % 2:  # each goes first as often as the other
            second, first = _seconds(ours, steps), _seconds(by_hand, steps)
        else:
            first, second = _seconds(by_hand, steps), _seconds(ours, steps)
        seconds.append((first, second))
    seconds = seconds[1:]  # the first turn warms up
    ratios = [ours / by_hand for by_hand, ours in seconds]
    return {
        "by_hand_ms": median(first for first, _ in seconds) * 1e3,
        "gradaccum_ms": median(second for _, second in seconds) * 1e3,
        "ratio": spread(ratios),
        "ratios": ratios,
    }


def _loop(function: str, name: str, optimizer: str, samples: Samples) -> Loop:
    model = _model(name)
    make: Callable[[nn.Module, Optimizer, Samples], Loop] = getattr(loops, function)
    fused = True if optimizer == "fused" else None
    return make(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), samples)


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "transformer":
        return Tiny()
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(20)]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def _samples(name: str, steps: int) -> Samples:
    generator = torch.Generator().manual_seed(0)
    count = steps * loops.SIZE
    inputs = (
        torch.randint(64, (count, 16), generator=generator)
        if name == "transformer"
        else torch.randn(count, 32, generator=generator)
    )
    return inputs, torch.randint(10, (count,), generator=generator)


def _seconds(loop: Loop, steps: int) -> float:
    """Return the median time of some steps."""
    seconds = []
    for _ in range(steps):
        begun = perf_counter()
        next(loop)
        seconds.append(perf_counter() - begun)
    return median(seconds)
