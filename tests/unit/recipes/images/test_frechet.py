"""The Fréchet distance: known values, and what it must tell apart."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from gradaccum.recipes.images.frechet import Statistics, distance, features, gaussian_distance


def images(seed=0, n=1000):
    """Return smooth images with some grain."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 4, 4, generator=generator) * 2 - 1
    smooth = functional.interpolate(coarse, 32, mode="bilinear")
    return (smooth + 0.2 * torch.randn(n, 3, 32, 32, generator=generator)).clamp(-1, 1)


def apart(one, other):
    return distance(Statistics([one]), Statistics([other]))


def covariance(d, seed):
    root = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T


def test_a_set_and_itself_are_not_apart():
    assert apart(images(), images()) == pytest.approx(0, abs=1e-5)


def test_gaussians_whose_distance_is_known():
    # One dimension: (m - m2)**2 + (s - s2)**2.
    one = [torch.tensor([1.0]).double(), torch.tensor([[4.0]]).double()]
    two = [torch.tensor([3.0]).double(), torch.tensor([[25.0]]).double()]
    assert gaussian_distance(*one, *two) == pytest.approx(4 + 9, rel=1e-12)
    # Covariances that commute, turned by one rotation: the same along each axis.
    turned = torch.linalg.qr(covariance(3, 0))[0]
    s, s2 = torch.tensor([1.0, 2, 0.25]).double(), torch.tensor([3.0, 0.5, 2]).double()
    mean = torch.zeros(3).double()
    c, c2 = (turned @ torch.diag(x**2) @ turned.T for x in (s, s2))
    expected = float((s - s2).square().sum())
    assert gaussian_distance(mean, c, mean + 2, c2) == pytest.approx(12 + expected, rel=1e-9)


def test_covariances_that_do_not_commute():
    """By the square root of the product itself, whose eigenvalues come out complex."""
    one, two, mean = covariance(5, 1), covariance(5, 2), torch.zeros(5).double()
    product = torch.linalg.eigvals(one @ two).sqrt().sum().real
    expected = float(one.trace() + two.trace() - 2 * product)
    assert gaussian_distance(mean, one, mean, two) == pytest.approx(expected, rel=1e-9)
    assert gaussian_distance(mean, two, mean, one) == pytest.approx(expected, rel=1e-9)


def test_fewer_samples_than_features_do_no_harm():
    few = apart(images(n=10), images(seed=1, n=10))
    assert 0 <= few < 1e3


def test_it_grows_with_blur_noise_and_colour():
    real, other = images(), images(seed=1)
    floor = apart(real, other)
    blurred = [functional.avg_pool2d(other, k, 1, k // 2) for k in (3, 5, 9)]
    grain = torch.randn(other.shape, generator=torch.Generator().manual_seed(2))
    noisy = [other + scale * grain for scale in (0.2, 0.4, 0.8)]
    shifted = [other + torch.tensor([d, 0, -d]).view(3, 1, 1) for d in (0.2, 0.4, 0.8)]
    for changed in (blurred, noisy, shifted):
        values = [floor, *(apart(real, one) for one in changed)]
        assert values == sorted(values)
        assert values[1] > 1.5 * floor


def test_it_tells_where_things_are():
    real, other = images(), images(seed=1)
    dark = torch.linspace(-0.5, 0.5, 32).view(32, 1)
    assert apart(real + dark, other + dark.flip(0)) > 5 * apart(real + dark, other + dark)


def test_it_tells_one_image_from_many():
    real, one = images(), images(seed=1)[:1].repeat(1000, 1, 1, 1)
    assert apart(real, one) > 5 * apart(real, images(seed=1))


def test_features_are_the_same_ever_after():
    state = torch.get_rng_state()
    first = features(images(n=3))
    torch.rand(5)
    torch.set_rng_state(state)
    assert torch.equal(first, features(images(n=3)))
    assert torch.equal(state, torch.get_rng_state()), "no generator but its own is drawn from"
    assert first.shape == (3, 288)
    assert first.dtype == torch.float64


def test_parts_make_the_same_statistics():
    whole, parts = Statistics([images()]), Statistics(images().split(64))
    assert torch.allclose(whole.mean, parts.mean, rtol=1e-5)
    assert torch.allclose(whole.covariance, parts.covariance, rtol=1e-4, atol=1e-8)


def test_statistics_are_mean_and_covariance_of_the_features():
    some = images(n=50)
    found, values = Statistics([some]), features(some).numpy()
    assert np.allclose(found.mean.numpy(), values.mean(0))
    assert np.allclose(found.covariance.numpy(), np.cov(values, rowvar=False))
