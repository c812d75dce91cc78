"""A model and its tokenizer on disk, as transformers loads them."""

from pathlib import Path
from typing import Any

from gradaccum.recipes.text.extras import import_extra


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model, in safetensors, and its tokenizer into a folder.

    Args:
        model: A transformers model.
        tokenizer: Its tokenizer.
        folder: Where to.
    """
    logging = import_extra("transformers.utils.logging", call="saving a model")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one file is written; a bar of its own tears the display
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
