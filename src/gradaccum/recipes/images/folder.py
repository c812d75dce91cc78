"""A user's own images: the files of a folder, as Pillow reads them."""

import os
import warnings
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from gradaccum.errors import DataError
from gradaccum.recipes.extras import import_extra

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})


def read_folder(folder: str | Path, *, at_least: int) -> list[np.ndarray]:
    """Read the images in a folder and its subfolders, except hidden ones.

    Args:
        folder: The folder, or one image.
        at_least: Pixels that the shorter side of each must have.

    Returns:
        ``(height, width, 3)`` uint8 images, one or more, in the order of their paths.

    Raises:
        DataError: There is no such folder, no image in it, or one that is broken or too small; the
            error names the file.
    """
    call = f"--data {quote(str(folder))}"
    path = Path(folder)
    if folder != "" and path.is_file():  # Path("") is the current folder: nobody has named it
        paths = [path]
    elif folder != "" and path.is_dir():
        paths = _walk(path)
    else:
        raise DataError(
            call, expected="a folder of images", got="no such folder", remedy="Correct the path."
        )
    if not paths:
        raise DataError(
            call,
            expected=f"images in the folder ({', '.join(sorted(SUFFIXES))})",
            got="none",
            remedy="Add some, or name another folder.",
        )
    return [_checked(path, at_least) for path in paths]


def read_image(path: Path, *, call: str) -> np.ndarray:
    """Read an image, turned as its camera says.

    Args:
        path: The file.
        call: What the user called, for the error.

    Returns:
        ``(height, width, 3)`` uint8 RGB. Grey is grey in all three; of what is transparent, the
        colour counts, and of what moves, the first picture.

    Raises:
        DataError: The file is no image, or a broken one.
    """
    image = import_extra("PIL.Image", call=call, extra="images")
    ops = import_extra("PIL.ImageOps", call=call, extra="images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of palettes, EXIF and size: told if it fails
            with image.open(path) as opened:
                return np.array(ops.exif_transpose(_in_8_bits(opened)).convert("RGB"))
    except Exception as error:  # each of Pillow's decoders has classes of its own
        raise DataError(
            call,
            expected="an image",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
            remedy="Mend the file or take it out of the folder.",
        ) from error


def _in_8_bits(opened: Any) -> Any:
    """Return an image whose 16 bits are made 8; Pillow would cut off all that is above 255."""
    if not opened.mode.startswith("I"):
        return opened
    return opened.point(lambda value: value / 256).convert("L")


def _checked(path: Path, at_least: int) -> np.ndarray:
    call = f"--data {quote(str(path))}"
    image = read_image(path, call=call)
    if min(image.shape[:2]) < at_least:
        height, width = image.shape[:2]
        raise DataError(
            call,
            expected=f"an image of at least {at_least} x {at_least} pixels",
            got=f"{width} x {height}",
            remedy="Take it out of the folder, or lower --image-size.",
        )
    return image


def _walk(root: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES)
