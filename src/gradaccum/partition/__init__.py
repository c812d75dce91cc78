"""Cutting an effective batch into micro-batches. Numpy only; knows nothing of models.

>>> import numpy as np
>>> from gradaccum import partition
>>> plan = partition.optimal(np.array([7, 100, 8, 90, 9, 8]), 200, cost=partition.Cost(fixed=10))
>>> [positions.tolist() for positions in plan]
[[1, 3], [4, 2, 5, 0]]
>>> plan.tokens, plan.padded_tokens, round(plan.real_share, 3)
(222, 236, 0.941)
"""

from gradaccum.partition.cost import Bound, Cap, Cost
from gradaccum.partition.cut import by_length, fixed, optimal
from gradaccum.partition.plan import Partition, accumulation_steps, num_parts, require_positive
from gradaccum.partition.policy import CappedCut, Cut, FixedCut
from gradaccum.partition.ranks import deal

__all__ = [
    "Bound",
    "Cap",
    "CappedCut",
    "Cost",
    "Cut",
    "FixedCut",
    "Partition",
    "accumulation_steps",
    "by_length",
    "deal",
    "fixed",
    "num_parts",
    "optimal",
    "require_positive",
]
