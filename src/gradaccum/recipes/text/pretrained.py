"""A model and its tokenizer on disk, as transformers loads them."""

from pathlib import Path
from typing import Any

from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.extras import import_extra


def load_pretrained(kind: str, name: str, *, tokenizer: Any, max_length: int) -> Any:
    """Load a pretrained model that can read what it is going to be given.

    Args:
        kind: Name of an auto class of transformers, ``"AutoModelForCausalLM"``.
        name: Folder, or name on a hub.
        tokenizer: The tokenizer that it is to be trained with.
        max_length: Longest sample in tokens.

    Returns:
        The model.

    Raises:
        DataError: There is none, or it is of another kind.
        ArgumentError: It embeds fewer tokens or fewer positions.
    """
    transformers = import_extra("transformers", call=f"--model {name}")
    try:
        model = getattr(transformers, kind).from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(
            f"--model {name}",
            expected=f"a folder or a name that transformers.{kind} loads",
            got=str(error).strip().splitlines()[0],
            remedy="Give the folder that a run left as 'model', or leave --model out.",
        ) from error
    if len(tokenizer) > (rows := model.get_input_embeddings().num_embeddings):
        raise ArgumentError(
            f"--model {name}",
            expected=f"a tokenizer of at most {rows} tokens, as the model embeds",
            got=f"{len(tokenizer)} tokens",
            remedy="Leave --tokenizer out to use the model's own.",
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ArgumentError(
            f"--model {name} --max-length {max_length}",
            expected=f"at most {positions} tokens in a sample, as the model has positions",
            got=str(max_length),
            remedy=f"Pass --max-length {positions}; longer texts are cut into pieces.",
        )
    return model


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
