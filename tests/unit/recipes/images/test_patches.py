"""Patches are functions of seed and index; their noise of the epoch as well."""

import numpy as np
import pytest
import torch

from gradaccum.recipes.images.patches import Patches, halvings, to_image, to_tensor


def images(*shapes):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]


def patches(seed=0, shapes=((40, 70), (150, 90)), count=50):
    return Patches(images(*shapes), size=32, count=count, seed=seed, noise=5)


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in ("image", "noise"))


def test_a_sample_is_an_image_and_noise():
    sample = patches()[0]
    assert sample["image"].shape == (3, 32, 32)
    assert sample["image"].dtype == sample["noise"].dtype == torch.float32
    assert sample["image"].min() >= -1
    assert sample["image"].max() <= 1
    assert sample["image"].is_contiguous()
    assert sample["noise"].shape == (5,)


def test_it_is_a_function_of_seed_and_index_in_whatever_order():
    one, other = patches(), patches()
    there, back = [one[k] for k in range(50)], [other[k] for k in reversed(range(50))]
    assert all(same(a, b) for a, b in zip(there, reversed(back), strict=True))
    assert not any(same(there[k], patches(seed=1)[k]) for k in range(10))
    assert not any(torch.equal(there[k]["image"], there[k + 1]["image"]) for k in range(10))


def test_another_epoch_has_other_noise_and_the_same_image():
    one, other = patches(), patches()
    other.set_epoch(1)
    for k in range(10):
        assert torch.equal(one[k]["image"], other[k]["image"])
        assert not torch.equal(one[k]["noise"], other[k]["noise"])
    other.set_epoch(0)
    assert same(one[3], other[3])


def test_noise_is_standard_normal():
    noise = torch.stack([patches(count=2000)[k]["noise"] for k in range(2000)])
    assert abs(noise.mean()) < 0.03
    assert noise.std() == pytest.approx(1, abs=0.03)


def test_every_patch_is_cut_out_of_an_image_and_half_are_mirrored():
    (image,) = images((33, 34))
    windows = {
        to_image(to_tensor(image[top : top + 32, left : left + 32])).tobytes()
        for top in range(2)
        for left in range(3)
    }
    single, found, plain = Patches([image], size=32, count=300, seed=0, noise=1), set(), 0
    for sample in single:
        patch = to_image(sample["image"])
        straight = patch.tobytes() in windows
        plain += straight
        found.add(patch.tobytes() if straight else patch[:, ::-1].tobytes())
    assert found == windows, "each place is reached, up to the borders"
    assert 110 < plain < 190


def test_all_images_and_scales_are_drawn_from():
    red, blue = (np.zeros((200, 300, 3), np.uint8) for _ in range(2))
    red[..., 0], blue[..., 2] = 255, 255
    blue[::2, :, 1] = 255  # stripes that halving makes even
    drawn = [
        (bool(patch["image"][0].max() > 0), bool(patch["image"][1].std() > 0.5))
        for patch in Patches([red, blue], size=32, count=100, seed=0, noise=1)
    ]
    assert 30 < sum(is_red for is_red, _ in drawn) < 70
    halved = [not striped for is_red, striped in drawn if not is_red]
    assert halved
    assert all(halved), "200 pixels are more than four patches of 32: halved at least once"


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((32, 32), [32]),
        ((63, 100), [63]),
        ((64, 64), [64, 32]),
        ((127, 500), [127, 63]),
        ((128, 200), [64, 32]),
        ((1000, 1000), [125, 62]),
    ],
)
def test_halvings_are_one_to_four_patches_high(shape, sizes):
    (image,) = images(shape)
    assert [min(one.shape[:2]) for one in halvings(image, at_least=32)] == sizes


def test_halving_takes_means():
    image = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    half = halvings(image, at_least=2)[-1]
    assert half.shape == (2, 3, 3)
    assert half[1, 2].tolist() == np.round(image[2:4, 4:6].mean((0, 1))).tolist()


def test_bytes_survive_the_way_to_a_tensor_and_back():
    every = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    assert (to_image(to_tensor(every)) == every).all()
    assert to_image(torch.full((3, 1, 1), 1.7)).max() == 255, "clamped, not wrapped"


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError):
        patches()[50]
    assert len(list(patches())) == 50
