"""A generator and a discriminator in the shape of DCGAN (arXiv:1511.06434)."""

from itertools import pairwise
from math import log2

from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm as normalized

_MOST = 8  # times the width that the deepest layers are wide


class Generator(nn.Module):
    """From noise to images in [-1, 1].

    Args:
        size: Pixels of a side, a power of two of at least 8.
        width: Channels of its last hidden layer.
        noise: Numbers in the noise.
    """

    def __init__(self, *, size: int, width: int, noise: int) -> None:
        super().__init__()
        channels = [width * factor for factor in reversed(_factors(size))]
        layers: list[nn.Module] = [nn.ConvTranspose2d(noise, channels[0], 4, bias=False)]
        for before, after in zip(channels, [*channels[1:], 3], strict=True):
            layers += [nn.BatchNorm2d(before), nn.ReLU(inplace=True)]
            layers += [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=after == 3)]
        self.layers = nn.Sequential(*layers, nn.Tanh())
        self.apply(_initialize)

    def forward(self, noise: Tensor) -> Tensor:
        """Return ``(batch, 3, size, size)`` images, of ``(batch, noise)``."""
        images: Tensor = self.layers(noise[:, :, None, None])
        return images


class Discriminator(nn.Module):
    """From images to the logit of being real.

    Args:
        size: Pixels of a side, a power of two of at least 8.
        width: Channels of its first hidden layer.
        spectral_norm: Whether the norm of each layer is held at one, in place of BatchNorm
            (arXiv:1802.05957): samples then do not interact.
    """

    def __init__(self, *, size: int, width: int, spectral_norm: bool = False) -> None:
        super().__init__()
        channels = [width * factor for factor in _factors(size)]
        layers: list[nn.Module] = [nn.Conv2d(3, channels[0], 4, 2, 1)]
        for before, after in pairwise(channels):
            layers += [nn.LeakyReLU(0.2, inplace=True)]
            layers += [nn.Conv2d(before, after, 4, 2, 1, bias=spectral_norm)]
            layers += [] if spectral_norm else [nn.BatchNorm2d(after)]
        layers += [nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(channels[-1], 1, 4)]
        self.layers = nn.Sequential(*layers)
        self.apply(_initialize)
        if spectral_norm:
            for layer in [one for one in self.modules() if isinstance(one, nn.Conv2d)]:
                normalized(layer)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch,)`` logits, of ``(batch, 3, size, size)`` images."""
        logits: Tensor = self.layers(images)
        return logits.flatten()


class Pair(nn.Module):
    """A generator and its discriminator.

    Args:
        size: Pixels of a side.
        width: Channels of the layers next to the image.
        noise: Numbers in the noise.
        spectral_norm: Of the discriminator.
    """

    def __init__(self, *, size: int, width: int, noise: int, spectral_norm: bool = False) -> None:
        super().__init__()
        self.generator = Generator(size=size, width=width, noise=noise)
        self.discriminator = Discriminator(size=size, width=width, spectral_norm=spectral_norm)


def _factors(size: int) -> list[int]:
    """Return how much wider each hidden layer is, from the image down to four pixels."""
    return [min(2**k, _MOST) for k in range(int(log2(size)) - 2)]


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
