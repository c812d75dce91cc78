"""In which dtypes gradients are summed, and parameters are updated."""

from enum import Enum, auto

import torch
from torch import Tensor

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Masters(Enum):
    """What a parameter of fewer bits than its gradient sum is updated by."""

    NONE = auto()  # itself: sums are rounded to its dtype
    KEPT = auto()  # a wide copy that is kept, and rounded to it
    PASSING = auto()  # a wide copy for the time of the step, rounded to it at random

    @classmethod
    def of(cls, master_weights: bool, stochastic_rounding: bool) -> "Masters":
        """Return what a user asks for, by at most one of the two."""
        if master_weights:
            return cls.KEPT
        return cls.PASSING if stochastic_rounding else cls.NONE


def narrower_than(least: torch.dtype) -> frozenset[torch.dtype]:
    """Return the dtypes of parameters whose gradient sums are wider than they are.

    Args:
        least: Of a sum.

    Returns:
        Those of fewer bits.
    """
    return frozenset(d for d in _REAL if torch.finfo(d).bits < torch.finfo(least).bits)


def sum_dtype_of(parameter: Tensor, least: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's gradient sum.

    Args:
        parameter: The parameter.
        least: Is taken where the parameter's own has fewer bits.

    Returns:
        The dtype.
    """
    return least if parameter.dtype in narrower_than(least) else parameter.dtype
