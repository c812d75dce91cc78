"""In which dtype gradients are summed."""

import torch
from torch import Tensor


def sum_dtype_of(parameter: Tensor, least: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's gradient sum.

    Args:
        parameter: The parameter.
        least: Is taken where the parameter's own has fewer bits.

    Returns:
        The dtype.
    """
    own = parameter.dtype
    narrower = not own.is_complex and torch.finfo(own).bits < torch.finfo(least).bits
    return least if narrower else own
