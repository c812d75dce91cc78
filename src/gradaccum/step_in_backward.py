"""Optimizers that step inside backward, by hooks on parameters: seen at the first backward.

Such a hook sees the gradient of one micro-batch and steps with it; nothing is accumulated. Not
every hook on a parameter is one, so what hooks did is looked at: once, on copies that are put back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradaccum.errors import PhaseError


def hooked(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters that something waits at, to be told when they have a gradient.

    Args:
        parameters: That are trained.

    Returns:
        Those with hooks.
    """
    return [
        p
        for p in parameters
        if getattr(p, "_post_accumulate_grad_hooks", None) or hasattr(p, "_in_backward_optimizers")
    ]


def refuse_steps(parameters: Sequence[Parameter], backward: Callable[[], None]) -> None:
    """Run a backward pass, and refuse one in which parameters move or lose their gradients.

    Args:
        parameters: Those with hooks.
        backward: Runs the pass.

    Raises:
        PhaseError: They did; they are put back.
    """
    before = [p.detach().clone() for p in parameters]
    reached: list[Tensor] = []
    note: Any = reached.append
    handles = [p.register_post_accumulate_grad_hook(note) for p in parameters]
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
    moved = [not torch.equal(p, old) for p, old in zip(parameters, before, strict=True)]
    if not any(moved) and all(p.grad is not None for p in reached):
        return
    with torch.no_grad():
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
    raise PhaseError(
        "backward of a micro-batch",
        expected="gradients that are summed until all micro-batches are in",
        got="hooks on parameters that step or clear inside backward, one micro-batch at a time",
        remedy="Remove the hooks (register_post_accumulate_grad_hook, "
        "_apply_optimizer_in_backward); the accumulator steps, once.",
    )
