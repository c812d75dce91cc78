"""Texts, encoded and split: what the recipes on text have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradaccum.errors import DataError
from gradaccum.recipes.settings import Settings
from gradaccum.recipes.text.encode import encode
from gradaccum.recipes.text.files import read_texts
from gradaccum.recipes.text.tokenizer import load_tokenizer, train_tokenizer

_HELD_OUT = 256


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Samples of token ids.

    Args:
        tokenizer: A Hugging Face tokenizer.
        train: Samples to train on.
        held_out: Samples of at most 256 texts, and a tenth of them, that are not trained on.
    """

    tokenizer: Any
    train: Sequence[list[int]]
    held_out: Sequence[list[int]]

    @property
    def lengths(self) -> np.ndarray:
        """``(n,)`` tokens of the training samples."""
        return np.asarray([len(ids) for ids in self.train])


def texts_of(settings: Settings, default: Sequence[str] | None) -> Sequence[str]:
    """Return the texts that the settings name.

    Args:
        settings: Of the run.
        default: Texts where the settings name none.

    Returns:
        The texts.
    """
    if settings.data is None and default is not None:
        return default
    return read_texts(settings.data or "", text_field=settings.text_field)


def corpus(settings: Settings, texts: Sequence[str], *, vocab_size: int) -> Corpus:
    """Encode texts and split them.

    Args:
        settings: Of the run.
        texts: The texts.
        vocab_size: Of the tokenizer that is trained, if the settings name none.

    Returns:
        The samples.

    Raises:
        DataError: There is too little text.
    """
    named = settings.tokenizer or settings.model
    tokenizer = load_tokenizer(named) if named else train_tokenizer(texts, vocab_size=vocab_size)
    # Texts are split, not samples, so that no piece of a held-out text is trained on.
    held_out = min(_HELD_OUT, len(texts) // 10)
    order = np.random.default_rng(settings.seed).permutation(len(texts)).tolist()
    chosen = [[texts[k] for k in part] for part in (order[held_out:], order[:held_out])]
    train, rest = (encode(tokenizer, part, max_length=settings.max_length) for part in chosen)
    if held_out == 0:  # a few long texts: hold out what comes last
        held_out = min(_HELD_OUT, len(train) // 10)
        train, rest = train[: len(train) - held_out], train[len(train) - held_out :]
    if not rest:
        raise DataError(
            f"--data {settings.data}",
            expected="at least 10 samples, one of them to be held out",
            got=f"{len(train)} of at most {settings.max_length} tokens",
            remedy="Give more text, or a smaller --max-length to cut it into more samples.",
        )
    return Corpus(tokenizer=tokenizer, train=train, held_out=rest)
