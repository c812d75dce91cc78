"""Places where samples of all micro-batches interact; the identity outside of lockstep."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum.coupled.lane import Meeting, current_lane


def meet(place: str, part: Any, joint: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
    """Meet the other micro-batches.

    Args:
        place: What must be the same for all that meet.
        part: What this one brings.
        joint: From the parts of all, in their order, to what each takes away.

    Returns:
        What this one takes away; outside of lockstep, of a meeting with none but itself.
    """
    lane = current_lane()
    if lane is None:
        return joint([part])[0]
    return lane.meet(Meeting(place=place, part=part, joint=joint, grad=torch.is_grad_enabled()))


def all_reduce(x: Tensor) -> Tensor:
    """Return the sum over all micro-batches, differentiable in each of them.

    Args:
        x: Of the same shape in each.

    Returns:
        The sum, of that shape; `x` itself outside of lockstep.
    """
    if current_lane() is None:
        return x
    return meet(f"all_reduce of {tuple(x.shape)}", x, _summed)  # type: ignore[no-any-return]


def all_gather(x: Tensor) -> Tensor:
    """Return the rows of all micro-batches, differentiable in each of them.

    Args:
        x: ``(n, ...)``, of as many rows as this micro-batch has.

    Returns:
        ``(N, ...)`` rows of all, those of this one from `offset` on; `x` outside of lockstep.
    """
    if current_lane() is None:
        return x
    place = f"all_gather of rows of {tuple(x.shape[1:])}"
    return meet(place, x, _joined)  # type: ignore[no-any-return]


def offset(x: Tensor) -> int:
    """Return the place of this micro-batch's rows among those that `all_gather` returns.

    Args:
        x: ``(n, ...)``, of as many rows as this micro-batch has.

    Returns:
        How many rows come before its own; 0 outside of lockstep.
    """
    return 0 if current_lane() is None else int(meet("offset", len(x), _before))


def _summed(parts: Sequence[Tensor]) -> list[Tensor]:
    total = torch.stack(list(parts)).sum(0)
    return [total.clone() for _ in parts]  # each may change its own in place


def _joined(parts: Sequence[Tensor]) -> list[Tensor]:
    whole = torch.cat(list(parts))
    return [whole.view_as(whole) for _ in parts]


def _before(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]
