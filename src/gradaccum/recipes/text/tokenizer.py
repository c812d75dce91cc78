"""A tokenizer: trained on the spot, or one that somebody has saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradaccum.errors import ArgumentError, DataError
from gradaccum.recipes.extras import import_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Names under which published tokenizers keep their special tokens. A bare tokenizer.json lists
# the tokens, but does not say which one is which.
_END_NAMES = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "[SEP]")
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>")
_MASK_NAMES = ("<mask>", "[MASK]")

_MIN_VOCAB_SIZE = 256 + 3  # every byte, and <pad>, <eos>, <mask>
_MAX_TRAINING_CHARACTERS = 20_000_000


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on texts.

    Every byte is a token of its own, so any text can be encoded and comes back unchanged.
    ``<eos>`` also serves as the beginning of a text, ``<pad>`` and ``<mask>`` exist besides.
    Of texts above 20 million characters, an evenly spaced part of that size is used.

    Args:
        texts: What to learn the vocabulary from.
        vocab_size: The most tokens to end up with, the 256 bytes and 3 special ones included.
            Short texts give fewer: a pair of tokens must occur twice to become one.

    Returns:
        The tokenizer. The same texts give the same one.

    Raises:
        ArgumentError: ``vocab_size`` is too small for the bytes and special tokens.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ArgumentError(
            f"train_tokenizer(vocab_size={vocab_size})",
            expected=f"{_MIN_VOCAB_SIZE} or more (256 bytes and 3 special tokens)",
            got=str(vocab_size),
            remedy="Raise vocab_size.",
        )
    tokenizers = import_extra("tokenizers", call="train_tokenizer()")
    transformers = import_extra("transformers", call="train_tokenizer()")

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=["<pad>", "<eos>", "<mask>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    step = max(1, -(-sum(map(len, texts)) // _MAX_TRAINING_CHARACTERS))
    bpe.train_from_iterator(texts[::step], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<eos>",
        eos_token="<eos>",
        mask_token="<mask>",
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer that somebody has saved.

    A tokenizer without an end token gets its separator as one, and a tokenizer without a pad
    token pads with its end token.

    Args:
        path: A folder, a bare ``tokenizer.json`` file, or a name on the Hugging Face hub.

    Returns:
        The tokenizer.

    Raises:
        DataError: Nothing there can be read as a tokenizer.
    """
    call = f"load_tokenizer({str(path)!r})"
    transformers = import_extra("transformers", call=call)
    try:
        if Path(path).is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # tokenizers raises a bare Exception for a broken file
        raise DataError(
            call,
            expected="a folder with a tokenizer, a tokenizer.json file or a name on the hub",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
            remedy="Correct the path, or save one there: tokenizer.save_pretrained(path).",
        ) from error
    named = tokenizer.get_added_vocab()
    end = tokenizer.eos_token or tokenizer.sep_token or _first(_END_NAMES, named)
    tokenizer.eos_token = end
    tokenizer.pad_token = tokenizer.pad_token or _first(_PAD_NAMES, named) or end
    tokenizer.mask_token = tokenizer.mask_token or _first(_MASK_NAMES, named)
    return tokenizer


def _first(names: Sequence[str], vocabulary: dict[str, int]) -> str | None:
    return next((name for name in names if name in vocabulary), None)
