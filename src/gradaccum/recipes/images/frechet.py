"""How far two sets of images are apart: a Fréchet distance on fixed random features.

The formula is that of FID (arXiv:1706.08500). The features are those of a small convolutional
network whose weights are drawn once and never trained, so that nothing has to be downloaded: they
tell colours, contrasts and textures apart, and where they are, but know no objects. Values compare
within this network alone, never with published ones.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

_CHANNELS = (3, 16, 24, 32)  # of the images, and after each layer
_GRID = 2  # cells along each side whose features are told apart
_SEED = 20_170_612


@torch.no_grad()
def features(images: Tensor) -> Tensor:
    """Return the features of images: means over the cells of a grid, at three scales.

    Args:
        images: ``(n, 3, height, width)`` in [-1, 1], at least 16 pixels each way.

    Returns:
        ``(n, 288)`` float64.
    """
    generator = torch.Generator().manual_seed(_SEED)
    found, hidden = [], images.float()
    for before, after in pairwise(_CHANNELS):
        # Kaiming: what a layer puts out varies as much as what it takes in.
        weight = torch.randn(after, before, 3, 3, generator=generator) * (2 / (9 * before)) ** 0.5
        hidden = functional.conv2d(hidden, weight.to(hidden), padding=1)
        hidden = functional.leaky_relu(hidden, 0.2)
        found.append(functional.adaptive_avg_pool2d(hidden, _GRID).flatten(1))
        hidden = functional.avg_pool2d(hidden, 2)
    return torch.cat(found, 1).double().cpu()


class Statistics:
    """Mean and covariance of features.

    Args:
        batches: ``(n, 3, height, width)`` images in [-1, 1], a part at a time.
    """

    def __init__(self, batches: Iterable[Tensor]) -> None:
        every = torch.cat([features(images) for images in batches])
        self.mean, self.covariance = every.mean(0), torch.cov(every.T)


def distance(one: Statistics, other: Statistics) -> float:
    """Return the Fréchet distance of two sets of images.

    Args:
        one: Of one set.
        other: Of the other.

    Returns:
        The squared 2-Wasserstein distance of the Gaussians that have these statistics.
    """
    return gaussian_distance(one.mean, one.covariance, other.mean, other.covariance)


def gaussian_distance(
    mean: Tensor, covariance: Tensor, mean2: Tensor, covariance2: Tensor
) -> float:
    r"""Return :math:`|m_1 - m_2|^2 + tr(C_1 + C_2 - 2 (C_1^{1/2} C_2 C_1^{1/2})^{1/2})`.

    Args:
        mean: ``(d,)`` of one Gaussian.
        covariance: ``(d, d)``, symmetric.
        mean2: ``(d,)`` of the other.
        covariance2: ``(d, d)``, symmetric.

    Returns:
        The squared 2-Wasserstein distance.
    """
    root = _root(covariance)
    # The product in this order is symmetric, so that its eigenvalues are real and none below zero
    # but by rounding; C_1 C_2 has the same ones, but they would come out complex.
    eigenvalues = torch.linalg.eigvalsh(_symmetric(root @ covariance2 @ root))
    both = eigenvalues.clamp(min=0).sqrt().sum()
    apart = (mean - mean2).square().sum()
    return float(apart + covariance.trace() + covariance2.trace() - 2 * both)


def _root(matrix: Tensor) -> Tensor:
    """Return the symmetric square root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(_symmetric(matrix))
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
