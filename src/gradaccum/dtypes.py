"""In which dtype gradients are summed."""

import torch
from torch import Tensor

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
