"""The model that benchmarks on text share."""

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel


def gpt(*, vocabulary: int, max_length: int, width: int, layers: int, **tokens: int) -> Any:
    """Build a GPT-2 of four heads without dropout.

    Args:
        vocabulary: Its tokens.
        max_length: Of a sample.
        width: Of a token.
        layers: How many.
        tokens: Ids of special ones, as in transformers.

    Returns:
        The model, in training mode.
    """
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=max_length,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        **tokens,
    )
    return GPT2LMHeadModel(config).train()
