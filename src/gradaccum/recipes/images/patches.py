"""Patches of images, and the noise that goes with each: functions of seed, index and epoch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_OCTAVES = 4  # a patch spans a quarter of the shorter side of its image, or more


class Patches:
    """Square crops of images at several scales, half of them mirrored, each with its noise.

    Crops are cut when they are asked for; images are kept as bytes, each at those of its halved
    sizes whose shorter side is one to four patches long. In the full photographs most crops of 64
    pixels would be of one colour.

    Args:
        images: ``(height, width, 3)`` uint8, each side at least `size`.
        size: Pixels of a side of a patch.
        count: How many patches.
        seed: A patch is a function of this and its index.
        noise: Numbers in the noise, which is another in each epoch.
    """

    def __init__(
        self, images: Sequence[np.ndarray], *, size: int, count: int, seed: int, noise: int
    ) -> None:
        self._size, self._count, self._seed, self._noise = size, count, seed, noise
        self._scales = [halvings(image, at_least=size) for image in images]
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other noise for another epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(index)  # so that iteration ends
        rng = np.random.default_rng([self._seed, index])
        scales = self._scales[rng.integers(len(self._scales))]
        image = scales[rng.integers(len(scales))]
        top, left = (int(rng.integers(side - self._size + 1)) for side in image.shape[:2])
        patch = image[top : top + self._size, left : left + self._size]
        if rng.random() < 0.5:
            patch = patch[:, ::-1]
        noise = np.random.default_rng([self._seed, index, self._epoch])
        return {
            "image": to_tensor(patch),
            "noise": torch.from_numpy(noise.standard_normal(self._noise, dtype=np.float32)),
        }


def halvings(image: np.ndarray, *, at_least: int) -> list[np.ndarray]:
    """Return an image at those of its halved sizes that are one to four patches high.

    Args:
        image: ``(height, width, 3)`` uint8.
        at_least: Pixels that the shorter side keeps.

    Returns:
        Images, from large to small; the smallest possible if none is so small.
    """
    found = [image]
    while min(found[-1].shape[:2]) >= 2 * at_least:
        found.append(_halved(found[-1]))
    return [one for one in found if min(one.shape[:2]) < _OCTAVES * at_least]


def to_tensor(image: np.ndarray) -> Tensor:
    """Return ``(height, width, 3)`` bytes as ``(3, height, width)`` float32 in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))).float() / 127.5 - 1.0


def to_image(tensor: Tensor) -> np.ndarray:
    """Return ``(3, height, width)`` in [-1, 1] as ``(height, width, 3)`` bytes."""
    values = ((tensor.detach().cpu().float() + 1.0) * 127.5).round().clamp(0, 255)
    return values.to(torch.uint8).permute(1, 2, 0).numpy()


def _halved(image: np.ndarray) -> np.ndarray:
    """Return the means of two by two pixels; an odd row or column falls away."""
    height, width = (side // 2 for side in image.shape[:2])
    blocks = image[: 2 * height, : 2 * width].reshape(height, 2, width, 2, 3)
    return np.round(blocks.mean((1, 3))).astype(np.uint8)
