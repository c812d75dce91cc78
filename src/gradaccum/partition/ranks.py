"""Which rank computes which samples of an effective batch."""

import numpy as np


def deal(count: int, lengths: np.ndarray | None, ranks: int) -> tuple[np.ndarray, ...]:
    """Deal samples to ranks, so that none has many more tokens than another.

    The longest goes first, and each to the rank that has least so far (Graham's longest processing
    time rule: at most 4/3 of the best possible). All ranks find the same.

    Args:
        count: Samples in the effective batch.
        lengths: ``(count,)`` lengths in tokens; None where unknown, so that all are alike.
        ranks: How many ranks there are.

    Returns:
        For each rank, the ascending positions of its samples: not the same number for each, and
        none for some where there are fewer samples than ranks.
    """
    tokens = np.ones(count, dtype=np.int64) if lengths is None else lengths
    load, dealt = np.zeros(ranks, dtype=np.int64), np.empty(count, dtype=np.int64)
    for position in np.argsort(-tokens, kind="stable"):
        rank = int(load.argmin())
        load[rank] += tokens[position]
        dealt[position] = rank
    return tuple(np.flatnonzero(dealt == rank) for rank in range(ranks))
