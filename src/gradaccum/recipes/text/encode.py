"""From texts to samples of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gradaccum.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1_000  # texts at a time: an encoding is far larger than the ids that are kept of it


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, max_length: int
) -> list[list[int]]:
    """Encode texts as samples of 2 to ``max_length`` tokens.

    The end token is put behind every text, so that a text's end is learnt; no other special
    token is added, and one that is spelled out in a text is encoded as ordinary characters.
    A longer text is cut into consecutive pieces. Together they are the text: no token is lost,
    none comes twice. Only an empty text gives no sample, as there is nothing to predict.

    Args:
        tokenizer: The tokenizer.
        texts: The texts.
        max_length: The most tokens of a sample, the end token included; 3 or more.

    Returns:
        Token ids, one list for each sample, in the order of the texts.

    Raises:
        ArgumentError: ``max_length`` is too small, or the tokenizer has no end token.
    """
    if max_length < 3:  # 3 tokens in pieces of at most 2 would leave one alone
        raise ArgumentError(
            f"encode(max_length={max_length})",
            expected="3 or more",
            got=str(max_length),
            remedy="Raise max_length.",
        )
    end = tokenizer.eos_token_id
    if end is None:
        raise ArgumentError(
            "encode(tokenizer)",
            expected="a tokenizer with an end token",
            got="eos_token=None",
            remedy="Name one of its tokens: tokenizer.eos_token = '</s>'.",
        )
    samples: list[list[int]] = []
    for start in range(0, len(texts), _BATCH):
        encoded = tokenizer(
            list(texts[start : start + _BATCH]),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning that a text exceeds the model: it is cut just below
        )
        for ids in encoded["input_ids"]:
            samples += _pieces([*ids, end], max_length)
    return samples


def _pieces(ids: list[int], max_length: int) -> Iterator[list[int]]:
    """Yield full pieces and the rest; a rest of one token takes a second from its neighbour."""
    start = 0
    while len(ids) - start > max_length:
        stop = start + max_length - (1 if len(ids) - start == max_length + 1 else 0)
        yield ids[start:stop]
        start = stop
    if len(ids) - start > 1:
        yield ids[start:]
