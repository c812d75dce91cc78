"""Where to cut: the cheapest contiguous cut of length-sorted samples, or a fixed number each."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import ceil

import numpy as np

from gradaccum.errors import ArgumentError, SampleTooLargeError
from gradaccum.partition.cost import Bound, Cap, Cost
from gradaccum.partition.plan import Partition, require_positive


def by_length(lengths: np.ndarray) -> np.ndarray:
    """Return positions from the longest sample to the shortest; equal lengths keep their order.

    Longest first: if the memory does not suffice, it shows in the first micro-batch.

    Args:
        lengths: ``(n,)`` tokens.

    Returns:
        ``(n,)`` positions.
    """
    return np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")


def fixed(
    num_samples: int,
    micro_batch_size: int,
    *,
    lengths: np.ndarray | None = None,
    bounds: Sequence[Bound] = (),
) -> Partition:
    """Cut into micro-batches of a fixed number of samples; the last may have fewer.

    Args:
        num_samples: Samples in the effective batch.
        micro_batch_size: Samples in one micro-batch.
        lengths: ``(n,)`` tokens. If given, samples of like length share a micro-batch.
        bounds: Where fewer samples fit.

    Returns:
        The partition.
    """
    size = require_positive("micro_batch_size", micro_batch_size)
    if lengths is None:
        order = np.arange(num_samples)
    else:
        lengths = checked_lengths(lengths, num_samples)
        order = by_length(lengths)
    parts, start = [], 0
    while start < num_samples:
        length = 1 if lengths is None else max(int(lengths[order[start]]), 1)
        width = int(min([size, *(bound.most(length) for bound in bounds)]))
        parts.append(order[start : start + width])
        start += width
    return Partition(micro_batches=tuple(parts), lengths=lengths)


def optimal(
    lengths: np.ndarray,
    cap: Cap | int,
    *,
    cost: Cost | None = None,
    indices: np.ndarray | None = None,
) -> Partition:
    r"""Cut so that the summed cost is the least that any cut under the cap can reach.

    Samples are sorted from long to short, so a micro-batch that begins at sample ``i`` of that
    order is padded to ``L_i``. With ``w_i`` the most samples of that length that the cap admits,

    .. math:: D_j = \min_{j - w_i \le i < j} D_i + \mathrm{fixed} + (j - i) f(L_i), \quad D_0 = 0.

    A sample can be moved at no cost into a following micro-batch that begins with its own length
    and is not full. So some optimal cut has each micro-batch either begin at the first sample of
    its length, or be full, and only those transitions are looked at: a million samples in
    effective batches of 4,096 take about a second.

    Args:
        lengths: ``(n,)`` tokens of each sample.
        cap: The most that one micro-batch may hold; a number means tokens after padding.
        cost: What a micro-batch costs.
        indices: ``(n,)`` places in the dataset, by which a message names a sample.

    Returns:
        The partition, longest micro-batch first.
    """
    cap = cap if isinstance(cap, Cap) else Cap(limit=cap)
    lengths = checked_lengths(lengths, len(lengths))
    admit(lengths, cap, indices=indices)
    order = by_length(lengths)
    bounds = _bounds(lengths[order], cap, cost or Cost())
    return Partition(
        micro_batches=tuple(order[i:j] for i, j in pairwise(bounds)),
        lengths=lengths,
    )


def _bounds(descending: np.ndarray, cap: Cap, cost: Cost) -> list[int]:
    """Return the cut points, 0 and n included, of the cheapest cut."""
    n = len(descending)
    if n == 0:
        return [0]
    starts = np.flatnonzero(np.r_[True, descending[1:] != descending[:-1]]).tolist()
    ends = [*starts[1:], n]
    best = np.full(n + 1, np.inf)  # best[j]: cost of the first j samples
    best[0] = 0.0
    counts = np.arange(1.0, n + 1)
    prices: list[float] = cost.of_sample(descending[starts]).tolist()
    most = np.array([cap.most(int(descending[start]), n) for start in starts])
    # A size that was fitted to measurements may fall somewhere by a little; widths may not, or
    # _walk_back would miss a cut.
    widths: list[int] = np.minimum.accumulate(most[::-1])[::-1].tolist()
    for start, end, price, width in zip(starts, ends, prices, widths, strict=True):
        # From the first sample of this length: any number of samples that fits.
        reach = min(start + width, n)
        ramp = counts[: reach - start] * price
        ramp += best[start] + cost.fixed  # rounds as in _walk_back, which compares for equality
        np.minimum(best[start + 1 : reach + 1], ramp, out=best[start + 1 : reach + 1])
        # From a later sample of this length: a full micro-batch, in blocks that do not overlap.
        full = width * price
        for i in range(start + 1, min(end, n - width + 1), width):
            j = min(i + width, end, n - width + 1)
            target = best[i + width : j + width]
            np.minimum(target, (best[i:j] + cost.fixed) + full, out=target)
    return _walk_back(best, starts, widths, prices, cost.fixed)


def _walk_back(
    best: np.ndarray, starts: list[int], widths: list[int], prices: list[float], fixed: float
) -> list[int]:
    """Return the cut points by undoing one micro-batch at a time, from the last sample."""
    run = np.zeros(len(best) - 1, dtype=np.int64)
    run[starts[1:]] = 1
    run = np.cumsum(run)  # which length, of each sample from the longest to the shortest
    width, price = np.asarray(widths)[run], np.asarray(prices)[run]
    bounds = [len(best) - 1]
    while (j := bounds[-1]) > 0:
        # widths grow as lengths fall, so no micro-batch that ends at j begins before this:
        i = np.arange(max(0, j - int(width[j - 1])), j)
        paid = (best[i] + fixed) + (j - i) * price[i]
        reached = (paid == best[j]) & (j - i <= width[i])
        bounds.append(int(i[np.argmax(reached)]))
    return bounds[::-1]


def checked_lengths(lengths: object, num_samples: int) -> np.ndarray:
    """Return lengths as ``(n,)`` integers.

    Args:
        lengths: What the user passed.
        num_samples: How many there must be.

    Returns:
        ``(n,)`` int64.

    Raises:
        ArgumentError: They are not `num_samples` whole numbers of at least 0.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or len(array) != num_samples:
        raise ArgumentError(
            f"lengths of shape {array.shape}",
            expected=f"one length for each of {num_samples} samples",
            got=f"shape {array.shape}",
            remedy="Pass a one-dimensional array in the order of the samples.",
        )
    if len(array) == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.min() < 0:
        bad = 0 if array.dtype.kind not in "iu" else int(np.argmin(array))
        raise ArgumentError(
            f"lengths[{bad}] = {array[bad]!r}",
            expected="whole numbers of tokens, at least 0",
            got=f"{array[bad]!r} of type {array.dtype}",
            remedy="Make the length function return the number of tokens of a sample.",
        )
    return array.astype(np.int64)


def admit(lengths: np.ndarray, cap: Cap, *, indices: np.ndarray | None = None) -> None:
    """Refuse samples that no micro-batch may hold.

    Args:
        lengths: ``(n,)`` tokens.
        cap: The most that one micro-batch may hold.
        indices: ``(n,)`` places in the dataset; by default 0 to n-1.

    Raises:
        SampleTooLargeError: One sample alone exceeds the cap; the largest is named.
    """
    if len(lengths) == 0 or cap.alone:
        return
    length = int(lengths.max())
    if cap.size is not None:  # one that was fitted may fall somewhere
        length = max(reversed(np.unique(lengths).tolist()), key=partial(cap.of, 1))
    if (needs := cap.of(1, length)) > cap.limit:
        largest = int(np.argmax(lengths == length))
        index = largest if indices is None else int(indices[largest])
        if cap.unit == "bytes":
            remedy = (
                f"Truncate it, raise memory to {cap.told(1.01 * needs)}, or let it need less: "
                "activation checkpointing (use_reentrant=False), a loss head in chunks."
            )
        else:
            remedy = f"Truncate it, or raise the cap to {ceil(needs):,} {cap.unit}."
        raise SampleTooLargeError(
            f"sample {index} (length {length:,})",
            expected=f"at most {cap.told(cap.limit)} in a micro-batch",
            got=f"{cap.told(needs)} for this sample alone",
            remedy=remedy,
        )
