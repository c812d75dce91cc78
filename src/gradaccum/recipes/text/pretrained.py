"""A model and its tokenizer on disk, as transformers loads them."""

from pathlib import Path
from typing import Any

from gradaccum.errors import DataError
from gradaccum.recipes.text.extras import import_extra


def load_pretrained(kind: str, name: str) -> Any:
    """Load a pretrained model.

    Args:
        kind: Name of an auto class of transformers, ``"AutoModelForCausalLM"``.
        name: Folder, or name on a hub.

    Returns:
        The model.

    Raises:
        DataError: There is none, or it is of another kind.
    """
    transformers = import_extra("transformers", call=f"--model {name}")
    try:
        return getattr(transformers, kind).from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(
            f"--model {name}",
            expected=f"a folder or a name that transformers.{kind} loads",
            got=str(error).strip().splitlines()[0],
            remedy="Give the folder that a run left as 'model', or leave --model out.",
        ) from error


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
