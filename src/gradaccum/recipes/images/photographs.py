"""Real photographs that need no download: those that lie inside the package scikit-image."""

from pathlib import Path

import numpy as np

from gradaccum.errors import DataError
from gradaccum.recipes.extras import import_extra
from gradaccum.recipes.images.folder import read_image

# All in colour and at least 300 pixels high. skimage.data knows more, but would download them.
NAMES = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)


def photographs() -> list[np.ndarray]:
    """Read the photographs. Their files are opened by path, so that nothing can be downloaded.

    Returns:
        Eight ``(height, width, 3)`` uint8 images, in 0.2 seconds.

    Raises:
        DataError: The installed scikit-image comes without them.
    """
    call = "photographs()"
    package = import_extra("skimage", call=call, extra="images")
    folder = Path(str(package.__file__)).parent / "data"
    missing = [name for name in NAMES if not (folder / name).is_file()]
    if missing:
        raise DataError(
            call,
            expected="the photographs that scikit-image ships",
            got=f"no {', '.join(missing)} in {folder}",
            remedy="Install scikit-image 0.25 or newer, or pass a folder of images as --data.",
        )
    return [read_image(folder / name, call=call) for name in NAMES]
