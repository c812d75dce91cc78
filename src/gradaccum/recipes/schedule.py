"""The course of the learning rate over a run."""

from math import cos, pi

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gradaccum.recipes.settings import Settings

_WARMUP = 20
_FLOOR = 0.1  # share of the peak that a cosine ends at


def scheduler(optimizer: Optimizer, settings: Settings, *, steps: int) -> LambdaLR:
    """Build a warm-up, then a constant, linear or cosine course.

    Args:
        optimizer: Its learning rates are the peak.
        settings: Of the run.
        steps: Optimizer steps of the run.

    Returns:
        The scheduler.
    """
    warmup = min(_WARMUP, steps // 2) if settings.warmup is None else settings.warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, steps - warmup)
        if settings.scheduler == "linear":
            return max(0.0, 1.0 - done)
        if settings.scheduler == "cosine":
            return _FLOOR + (1.0 - _FLOOR) * 0.5 * (1.0 + cos(pi * min(done, 1.0)))
        return 1.0

    return LambdaLR(optimizer, factor)
