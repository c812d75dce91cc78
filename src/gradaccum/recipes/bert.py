"""A masked language model on docstrings of Python's standard library, or on your own text."""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from gradaccum.errors import ArgumentError
from gradaccum.loss import Loss, losses
from gradaccum.recipes.extras import import_extra
from gradaccum.recipes.recipe import Recipe, adamw, chosen_device
from gradaccum.recipes.settings import IMAGES, Settings
from gradaccum.recipes.text import stdlib
from gradaccum.recipes.text.corpus import corpus, texts_of
from gradaccum.recipes.text.entropy import unigram_entropy
from gradaccum.recipes.text.pretrained import load_pretrained, save_pretrained

DEFAULTS = MappingProxyType({"steps": 400, "lr": 2e-3, "max_length": 256})
UNUSED = IMAGES
_VOCABULARY = 2048
_SHARE = 0.15  # of tokens to be predicted, as in BERT (arXiv:1810.04805)
_SHOWN, _SHOWN_TOKENS = 4, 60


def build(settings: Settings) -> Recipe:
    """Build the recipe.

    Args:
        settings: Of the run.

    Returns:
        Its parts.

    Raises:
        ArgumentError: The tokenizer has no mask token.
    """
    torch.manual_seed(settings.seed)
    default = None if settings.data is not None else stdlib.docstrings()
    data = corpus(settings, texts_of(settings, default), vocab_size=_VOCABULARY)
    tokenizer = data.tokenizer
    if tokenizer.mask_token_id is None:
        raise ArgumentError(
            f"--tokenizer {settings.tokenizer or settings.model}",
            expected="a tokenizer with a mask token",
            got="mask_token None",
            remedy="Leave --tokenizer out to train one on the data.",
        )
    model = _model(settings, tokenizer)
    model = model.to(chosen_device(settings), settings.parameter_dtype).train()
    held_out = Masked(data.held_out, tokenizer, seed=settings.seed + 1)

    return Recipe(
        model=model,
        loss=loss,
        optimizer=adamw(model, settings),
        train=Masked(data.train, tokenizer, seed=settings.seed),
        held_out=[held_out[k] for k in range(len(held_out))],
        lengths=data.lengths,
        pad=tokenizer,
        baseline=("unigram entropy", unigram_entropy(data.held_out, skip_first=False)),
        save=partial(save_pretrained, model, tokenizer),
        show=lambda: _fill(model, tokenizer, held_out),
    )


def loss(model: Any, micro: dict[str, torch.Tensor]) -> Loss:
    """Return the cross-entropy of the masked tokens of a micro-batch.

    Args:
        model: A masked language model.
        micro: ``input_ids``, ``attention_mask`` and ``labels``, each ``(batch, length)``.

    Returns:
        The summed loss, and the number of masked tokens, which differs from sample to sample.
    """
    logits = model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits
    return losses.cross_entropy(logits, micro["labels"])


class Masked:
    """Samples with some tokens masked: a function of seed, epoch and sample alone.

    Of the tokens to be predicted, 80 % are masked, 10 % are exchanged for a random one and 10 %
    are left, as in BERT (arXiv:1810.04805).

    Args:
        sequences: Token ids.
        tokenizer: For its mask token.
        seed: Of the choice.
    """

    def __init__(self, sequences: Sequence[list[int]], tokenizer: Any, *, seed: int) -> None:
        self._sequences, self._seed, self._epoch = sequences, seed, 0
        self._mask, self._size = tokenizer.mask_token_id, len(tokenizer)

    def set_epoch(self, epoch: int) -> None:
        """Choose other tokens for another epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = np.asarray(self._sequences[index])
        rng = np.random.default_rng([self._seed, self._epoch, index])
        predicted = rng.random(len(ids)) < _SHARE
        way = rng.random(len(ids))
        masked = np.where(predicted & (way < 0.8), self._mask, ids)
        other = rng.integers(0, self._size, len(ids))
        masked = np.where(predicted & (way >= 0.9), other, masked)
        return {
            "input_ids": torch.from_numpy(masked),
            "attention_mask": torch.ones(len(ids), dtype=torch.long),
            "labels": torch.from_numpy(np.where(predicted, ids, -100)),
        }


def _model(settings: Settings, tokenizer: Any) -> Any:
    transformers = import_extra("transformers", call="the recipe 'bert'")
    if settings.model is not None:
        return load_pretrained(
            "AutoModelForMaskedLM",
            settings.model,
            tokenizer=tokenizer,
            max_length=settings.max_length,
        )
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=settings.max_length,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@torch.no_grad()
def _fill(model: Any, tokenizer: Any, samples: Masked) -> str:
    """Return a few held-out texts as the model fills in their masks."""
    model.eval()
    shown = []
    for k in range(min(_SHOWN, len(samples))):
        sample = samples[k]
        ids = sample["input_ids"].to(model.device)
        best = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0]
        hidden = (ids == tokenizer.mask_token_id).cpu()
        filled = torch.where(hidden, best.argmax(-1).cpu(), sample["input_ids"])
        right = (filled == sample["labels"])[hidden].sum()
        before, after = (_line(tokenizer, ids) for ids in (sample["input_ids"], filled))
        shown.append(f"{before}\n-> {after}\n   ({right} of {hidden.sum()} right)")
    model.train()
    return "\n\n".join(shown)


def _line(tokenizer: Any, ids: torch.Tensor) -> str:
    """Return the start of a text on one line."""
    return " ".join(tokenizer.decode(ids[:_SHOWN_TOKENS]).split())
