"""What a generator makes: images with fixed noise, a grid of them, and weights on disk."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradaccum.errors import DataError
from gradaccum.recipes.extras import import_extra
from gradaccum.recipes.images.dcgan import Pair
from gradaccum.recipes.images.patches import to_image

_PART = 64  # images at once
_STATISTICS = 512  # images that BatchNorm's statistics are measured on


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a pair is built from.

    Args:
        size: Pixels of a side.
        width: Channels of the layers next to the image.
        noise: Numbers in the noise.
        spectral_norm: Of the discriminator.
    """

    size: int
    width: int
    noise: int
    spectral_norm: bool

    def pair(self) -> Pair:
        """Build a pair with new weights."""
        return Pair(**asdict(self))


def fixed_noise(count: int, size: int, *, seed: int) -> Tensor:
    """Return ``(count, size)`` noise; the first rows are the same whatever the count."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def at_rest(generator: nn.Module, noise: Tensor) -> nn.Module:
    """Return a copy in evaluation mode, whose BatchNorm statistics are measured on noise.

    Averaged weights have never been run, so the statistics that training has left belong to
    others: standing statistics (arXiv:1809.11096).

    Args:
        generator: Is not changed.
        noise: ``(n, noise)``; the first 512 are used.

    Returns:
        The copy: each image that it makes depends on its own noise alone.
    """
    copy = deepcopy(generator).train()
    for module in copy.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # a plain mean over all parts
    device = next(copy.parameters()).device
    for part in noise[:_STATISTICS].split(_PART):
        copy(part.to(device))
    return copy.eval()


@torch.no_grad()
def images_of(generator: nn.Module, noise: Tensor) -> Iterator[Tensor]:
    """Yield images, ``(at most 64, 3, size, size)`` at a time.

    Args:
        generator: In evaluation mode.
        noise: ``(n, noise)``.

    Yields:
        Images in [-1, 1].
    """
    device = next(generator.parameters()).device
    for part in noise.split(_PART):
        yield generator(part.to(device))


def write_grid(images: Tensor, path: Path, *, columns: int) -> None:
    """Write images side by side as a PNG.

    Args:
        images: ``(n, 3, size, size)`` in [-1, 1]; what does not fill a row is left out.
        path: The file.
        columns: Images in a row.
    """
    pillow = import_extra("PIL.Image", call="pictures", extra="images")
    rows = images[: len(images) // columns * columns].unflatten(0, (-1, columns))
    grid = rows.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
    pillow.fromarray(to_image(grid)).save(path, format="PNG")


def save_pair(pair: Pair, generator: nn.Module, shape: Shape, folder: Path) -> None:
    """Write both models, as safetensors, and what they are built from.

    Args:
        pair: Its discriminator is written.
        generator: Is written in place of the pair's own.
        shape: Of the pair.
        folder: Where to.
    """
    for name, module in (("generator", generator), ("discriminator", pair.discriminator)):
        tensors = {key: value.contiguous() for key, value in module.state_dict().items()}
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(shape), indent=2) + "\n")


def load_pair(folder: Path | str) -> Pair:
    """Load what a run has left as ``model``.

    Args:
        folder: The folder.

    Returns:
        The pair on the CPU, in evaluation mode.

    Raises:
        DataError: There is no such pair in it.
    """
    folder = Path(folder)
    try:
        pair = Shape(**json.loads((folder / "config.json").read_text())).pair()
        for name in ("generator", "discriminator"):
            getattr(pair, name).load_state_dict(load_file(folder / f"{name}.safetensors"))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"load_pair({str(folder)!r})",
            expected="the folder 'model' of a run of the recipe 'gan'",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
            remedy="Correct the path.",
        ) from error
    return pair.eval()
