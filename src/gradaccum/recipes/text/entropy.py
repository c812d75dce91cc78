"""What a model without any context could reach: the yardstick for a first loss curve."""

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from gradaccum.errors import ArgumentError


def unigram_entropy(samples: Sequence[Sequence[int]], *, skip_first: bool) -> float:
    """Return the entropy of the token distribution of these samples, in nats per token.

    With ``p(t)`` the share of token ``t`` among all the tokens that are counted::

        H = - sum over t of p(t) log p(t)

    No model that ignores the context has a lower mean cross-entropy on these very samples,
    so a loss below ``H`` shows that the context is used.

    >>> round(unigram_entropy([[0, 1, 1, 2], [0, 2]], skip_first=True), 4)  # log(2)
    0.6931

    Args:
        samples: Token ids, one sequence for each sample; lengths may differ.
        skip_first: Leave out the first token of every sample. True for a causal model, which
            does not predict it; False for a masked model.

    Returns:
        The entropy in nats per token, 0.0 or more.

    Raises:
        ArgumentError: No token is left to count.
    """
    start = 1 if skip_first else 0
    tokens = chain.from_iterable(islice(sample, start, None) for sample in samples)
    counts = np.unique(np.fromiter(tokens, dtype=np.int64), return_counts=True)[1]
    if counts.size == 0:
        raise ArgumentError(
            f"unigram_entropy(samples, skip_first={skip_first})",
            expected=f"at least one sample of {start + 1} or more tokens",
            got=f"{len(samples)} samples without a token to count",
            remedy="Pass longer samples.",
        )
    shares = counts / counts.sum()
    # `0.0 -`, not a minus sign: a single kind of token gives 0.0 and not -0.0.
    return 0.0 - float((shares * np.log(shares)).sum())
