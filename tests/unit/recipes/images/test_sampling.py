"""Generators, discriminators, their pictures, and their way to a folder and back."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gradaccum.errors import DataError
from gradaccum.recipes.images.dcgan import Pair
from gradaccum.recipes.images.sampling import (
    Shape,
    at_rest,
    fixed_noise,
    images_of,
    load_pair,
    save_pair,
    write_grid,
)

SMALL = Shape(size=32, width=4, noise=6, spectral_norm=False)


def pair(**changes) -> Pair:
    torch.manual_seed(0)
    return Shape(**{"size": 32, "width": 4, "noise": 6, "spectral_norm": False} | changes).pair()


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_shapes_at_every_size(size):
    made = pair(size=size, width=2)
    images = made.generator(torch.randn(3, 6))
    assert images.shape == (3, 3, size, size)
    assert images.abs().max() < 1
    assert made.discriminator(images).shape == (3,)


def test_new_weights_are_as_in_dcgan():
    made = pair(width=32)
    for module in made.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1)
        elif isinstance(module, nn.BatchNorm2d):
            assert module.weight.mean().item() == pytest.approx(1, abs=0.02)


def test_spectral_norm_bounds_every_layer_of_the_discriminator():
    made = pair(spectral_norm=True, width=16)
    for _ in range(50):
        made.discriminator(torch.randn(4, 3, 32, 32))
    layers = [one for one in made.discriminator.modules() if isinstance(one, nn.Conv2d)]
    for layer in layers:
        norm = torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)
        assert norm.item() == pytest.approx(1, abs=0.02)
    assert len(layers) == 4
    assert not any("parametrizations" in name for name, _ in made.generator.named_modules())


@pytest.mark.parametrize("spectral_norm", [False, True])
def test_with_spectral_norm_samples_do_not_interact(spectral_norm):
    made, images = pair(spectral_norm=spectral_norm), torch.randn(4, 3, 32, 32)
    made.eval().discriminator(images)  # the norms are then no longer being estimated
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    together, alone = made.discriminator(images), made.discriminator(images[:2])
    assert torch.allclose(together[:2], alone, rtol=1e-4) == spectral_norm


def test_at_rest_each_image_depends_on_its_own_noise():
    made, noise = pair(), fixed_noise(128, 6, seed=0)
    for _ in range(3):
        made.generator(torch.randn(16, 6))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    rested = at_rest(made.generator, noise)
    together = torch.cat(list(images_of(rested, noise)))
    alone = next(images_of(rested, noise[5:6]))
    assert torch.allclose(alone[0], together[5], atol=1e-6)
    assert not together.requires_grad
    after = made.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "it is a copy"


def test_at_rest_statistics_are_those_of_the_noise():
    made, noise = pair(), fixed_noise(64, 6, seed=0)
    made.generator.train()
    with torch.no_grad():
        expected = made.generator(noise)  # the statistics of this very batch
    found = next(images_of(at_rest(made.generator, noise), noise))
    # But for the unbiased variance that BatchNorm keeps: 64 x 16 values in the first layer.
    assert torch.allclose(found, expected, atol=1e-3)


def test_fixed_noise_begins_alike_whatever_its_size():
    assert torch.equal(fixed_noise(8, 6, seed=1), fixed_noise(100, 6, seed=1)[:8])
    assert not torch.equal(fixed_noise(8, 6, seed=1), fixed_noise(8, 6, seed=2))


def test_a_grid_holds_images_row_by_row(tmp_path):
    images = torch.rand(7, 3, 5, 5) * 2 - 1
    write_grid(images, tmp_path / "grid.png", columns=3)
    with Image.open(tmp_path / "grid.png") as opened:
        drawn = np.asarray(opened)
    assert drawn.shape == (10, 15, 3)
    expected = ((images[4].permute(1, 2, 0) + 1) * 127.5).round().numpy()
    assert (drawn[5:10, 5:10] == expected).all()


@pytest.mark.parametrize("spectral_norm", [False, True])
def test_a_pair_comes_back_from_its_folder(tmp_path, spectral_norm):
    shape = Shape(size=32, width=4, noise=6, spectral_norm=spectral_norm)
    made = pair(spectral_norm=spectral_norm).to(memory_format=torch.channels_last)
    rested = at_rest(made.generator, fixed_noise(64, 6, seed=0))
    save_pair(made, rested, shape, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "discriminator.safetensors",
        "generator.safetensors",
    }
    loaded, noise = load_pair(tmp_path), torch.randn(2, 6)
    assert not loaded.training
    images = rested(noise)
    assert torch.allclose(loaded.generator(noise), images, atol=1e-6)
    assert torch.allclose(loaded.discriminator(images), made.eval().discriminator(images))


@pytest.mark.parametrize("harm", ["nothing", "config.json", "generator.safetensors"])
def test_a_folder_without_a_pair_is_refused(tmp_path, harm):
    if harm != "nothing":
        save_pair(pair(), pair().generator, SMALL, tmp_path)
        (tmp_path / harm).write_text('{"size": 8}')
    with pytest.raises(DataError, match="of a run of the recipe 'gan'"):
        load_pair(tmp_path)
