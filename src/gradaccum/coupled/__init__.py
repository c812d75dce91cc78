"""Samples that interact across micro-batches, exactly.

In lockstep the micro-batches of an effective batch are like ranks: each runs the model's forward
pass by itself, and they meet where samples interact. Outside of it these functions are the
identity, so that a model stays plain.

>>> import torch
>>> from gradaccum import coupled
>>> coupled.all_reduce(torch.tensor([1.0, 2.0])).tolist()
[1.0, 2.0]
"""

from gradaccum.coupled.batchnorm import ExactBatchNorm, exact_batchnorm, is_exact
from gradaccum.coupled.lockstep import Lockstep
from gradaccum.coupled.meeting import all_gather, all_reduce, offset

__all__ = [
    "ExactBatchNorm",
    "Lockstep",
    "all_gather",
    "all_reduce",
    "exact_batchnorm",
    "is_exact",
    "offset",
]
