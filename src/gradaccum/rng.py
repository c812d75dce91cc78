"""Randomness that is a function of a seed."""

import numpy as np

from gradaccum.errors import ArgumentError


def data_order(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the order of samples in an epoch: a function of seed and epoch alone.

    Args:
        num_samples: Samples in the dataset.
        seed: Seed of the run.
        epoch: Which epoch, from 0.

    Returns:
        ``(num_samples,)`` indices, a permutation.
    """
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def require_seed(seed: object, *, call: str) -> None:
    """Refuse what no order can be drawn from.

    Args:
        seed: What the user passed.
        call: What was called, in the user's spelling.

    Raises:
        ArgumentError: It is no whole number of at least 0.
    """
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ArgumentError(
            call,
            expected="a whole number of at least 0",
            got=repr(seed),
            remedy="Pass seed=0, the default.",
        )
