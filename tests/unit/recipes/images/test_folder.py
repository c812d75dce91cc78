"""A folder of one's own images, and what is said where it cannot be read."""

import sys

import numpy as np
import pytest
from PIL import Image

from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.images.folder import read_folder
from gradaccum.recipes.images.photographs import NAMES, photographs


def picture(width=40, height=36, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "ppm"])
def test_every_pixel_of_an_image_is_read(tmp_path, suffix):
    picture().save(tmp_path / f"one.{suffix}")
    (image,) = read_folder(tmp_path, at_least=36)
    assert image.dtype == np.uint8
    assert (image == np.asarray(picture())).all()


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "webp", "gif"])
def test_lossy_ones_are_read_too(tmp_path, suffix):
    picture().save(tmp_path / f"one.{suffix}")
    assert read_folder(tmp_path, at_least=32)[0].shape == (36, 40, 3)


def test_subfolders_in_the_order_of_paths_and_nothing_hidden(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    for width, name in ((41, "b/0.png"), (42, "a.png"), (43, ".a.png"), (44, ".cache/a.png")):
        picture(width).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    assert [image.shape[1] for image in read_folder(tmp_path, at_least=32)] == [42, 41]
    assert [image.shape[1] for image in read_folder(tmp_path / "a.png", at_least=32)] == [42]


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    ramp = np.arange(64 * 64).reshape(64, 64)
    if mode == "I;16":
        Image.fromarray((16 * ramp).astype(np.uint16)).save(tmp_path / "one.png")
    else:
        Image.fromarray((ramp // 16).astype(np.uint8)).convert(mode).save(tmp_path / "one.tiff")
    (image,) = read_folder(tmp_path, at_least=64)
    assert image.shape == (64, 64, 3)
    assert abs(image.astype(int) - (ramp // 16)[..., None]).mean() < (130 if mode == "1" else 2)


def test_a_photograph_is_turned_as_the_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right by 90 degrees
    picture(50, 40).save(tmp_path / "one.jpg", exif=exif)
    assert read_folder(tmp_path, at_least=32)[0].shape == (50, 40, 3)


def broken(folder):
    picture().save(folder / "one.png")
    (folder / "two.png").write_bytes((folder / "one.png").read_bytes()[:200])


BAD = {
    "no folder": (lambda f: None, "nowhere", "no such folder"),
    "nothing named": (lambda f: None, None, "no such folder"),
    "empty": (lambda f: None, ".", "images in the folder"),
    "no image": (lambda f: (f / "a.txt").write_text("words"), ".", "got none"),
    "cut off": (broken, ".", "two.png: expected an image"),
    "words": (lambda f: (f / "one.png").write_text("words"), ".", "one.png: expected an image"),
    "too small": (
        lambda f: picture(31, 90).save(f / "one.png"),
        ".",
        "at least 32 x 32 pixels, got 31 x 90. Take it out of the folder, or lower --image-size",
    ),
    "too low": (lambda f: picture(90, 31).save(f / "one.png"), ".", "got 90 x 31"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_told_by_name(tmp_path, name):
    prepare, source, expected = BAD[name]
    prepare(tmp_path)
    with pytest.raises(DataError) as raised:
        read_folder("" if source is None else tmp_path / source, at_least=32)
    assert expected in str(raised.value)
    assert str(raised.value).startswith("--data ")


def test_photographs_are_in_colour_and_large_enough():
    found = photographs()
    assert len(found) == len(NAMES) == 8
    for image in found:
        assert image.dtype == np.uint8
        assert min(image.shape[:2]) >= 256
        assert np.ptp(image, axis=-1).max() > 100, "not grey"


def test_photographs_are_never_downloaded(tmp_path, monkeypatch):
    import skimage

    monkeypatch.setattr(skimage, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(DataError, match=r"astronaut\.png, chelsea\.png"):
        photographs()


@pytest.mark.parametrize("package", ["skimage", "PIL"])
def test_a_package_that_is_missing_is_named(monkeypatch, package):
    class Missing:
        def find_spec(self, name, path, target=None):
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ArgumentError) as raised:
        photographs()
    assert f"expected the package {package}" in str(raised.value)
    assert "pip install 'gradaccum[images]'" in str(raised.value)
