"""Hugging Face's transformers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def masks_as_in_earnest() -> Iterator[None]:
    """Let models on fake tensors build the attention masks that they build in earnest.

    Without an attention mask, transformers looks at the positions for several sequences in a row,
    and builds no mask if there are none; on fake tensors it cannot look, and builds one. For a
    GPT-2 of 4 layers that is 7 % of the peak at 512 tokens.

    Yields:
        Nothing. Does nothing where transformers is not imported.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    original = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original
