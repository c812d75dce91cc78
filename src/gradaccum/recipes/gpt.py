"""A causal language model on functions of Python's standard library, or on your own text."""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from gradaccum.loss import Loss, losses
from gradaccum.recipes.extras import import_extra
from gradaccum.recipes.recipe import Recipe, adamw, chosen_device
from gradaccum.recipes.settings import IMAGES, Settings
from gradaccum.recipes.text import stdlib
from gradaccum.recipes.text.corpus import corpus, texts_of
from gradaccum.recipes.text.entropy import unigram_entropy
from gradaccum.recipes.text.pretrained import load_pretrained, save_pretrained

DEFAULTS = MappingProxyType({"steps": 240, "lr": 3e-3})
UNUSED = IMAGES
_VOCABULARY = 2048
_LONG = 2048  # tokens: 998 of 1,000 functions are shorter
_PROMPT = "def "
_PROMPT_TOKENS = 4  # of a held-out text, where the user brings their own
_SHOWN = 120  # tokens of a sample of what was learnt


def build(settings: Settings) -> Recipe:
    """Build the recipe.

    Args:
        settings: Of the run.

    Returns:
        Its parts.
    """
    torch.manual_seed(settings.seed)
    default = None if settings.data is not None else _default_texts(settings)
    data = corpus(settings, texts_of(settings, default), vocab_size=_VOCABULARY)
    device = chosen_device(settings)
    model = _model(settings, data.tokenizer).to(device, settings.parameter_dtype).train()

    prompt = data.tokenizer(_PROMPT, add_special_tokens=False)["input_ids"]
    if settings.data is not None:
        prompt = data.held_out[0][:_PROMPT_TOKENS]

    return Recipe(
        model=model,
        loss=loss,
        chunked_loss=chunked_loss if _head_is_linear(model) else None,
        optimizer=adamw(model, settings),
        train=_samples(data.train),
        held_out=_samples(data.held_out),
        lengths=data.lengths,
        pad={"input_ids": _filler(data.tokenizer), "labels": -100},
        baseline=("unigram entropy", unigram_entropy(data.held_out, skip_first=True)),
        save=partial(save_pretrained, model, data.tokenizer),
        show=lambda: _generate(model, data.tokenizer, prompt, settings.seed),
    )


def _default_texts(settings: Settings) -> list[str]:
    """Return functions; or whole modules, where samples may be longer than functions are."""
    return stdlib.functions() if settings.max_length < _LONG else stdlib.modules()


def loss(model: Any, micro: dict[str, torch.Tensor]) -> Loss:
    """Return the next-token cross-entropy of a micro-batch.

    No attention mask: padding stands on the right, and causal attention looks to the left, so no
    real token sees it; its own predictions carry no label.

    Args:
        model: A causal language model.
        micro: ``input_ids`` and ``labels``, each ``(batch, length)``.

    Returns:
        The summed loss, and the number of predicted tokens.
    """
    logits = model(input_ids=micro["input_ids"], use_cache=False).logits
    return losses.causal_cross_entropy(logits, micro["labels"])


def chunked_loss(model: Any, micro: dict[str, torch.Tensor]) -> Loss:
    """Return the same loss, without ever holding the logits of all tokens.

    Args:
        model: A causal language model whose head is a linear layer.
        micro: ``input_ids`` and ``labels``, each ``(batch, length)``.

    Returns:
        The summed loss, and the number of predicted tokens.
    """
    hidden = model.base_model(input_ids=micro["input_ids"], use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    return losses.causal_linear_cross_entropy(
        hidden, head.weight, micro["labels"], bias=getattr(head, "bias", None)
    )


@torch.no_grad()
def _head_is_linear(model: Any) -> bool:
    """Return whether logits are the head's product and no more: some models scale or bound them."""
    ids = torch.arange(1, 4, device=model.device).unsqueeze(0)
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        return False
    mode = model.training
    model.eval()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    same = torch.allclose(head(hidden), model(input_ids=ids, use_cache=False).logits, atol=1e-5)
    model.train(mode)
    return same


def _filler(tokenizer: Any) -> int:
    """Return what rows are filled up with on the right, where no real token sees it.

    Not the padding token: transformers looks for it in every batch that comes without a mask, and
    warns that there ought to be one.
    """
    return 1 if tokenizer.pad_token_id == 0 else 0


def _samples(sequences: Sequence[list[int]]) -> list[dict[str, torch.Tensor]]:
    tensors = map(torch.tensor, sequences)
    return [{"input_ids": ids, "labels": ids} for ids in tensors]


def _model(settings: Settings, tokenizer: Any) -> Any:
    transformers = import_extra("transformers", call="the recipe 'gpt'")
    if settings.model is not None:
        return load_pretrained(
            "AutoModelForCausalLM",
            settings.model,
            tokenizer=tokenizer,
            max_length=settings.max_length,
        )
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=settings.max_length,
            n_embd=128,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@torch.no_grad()
def _generate(model: Any, tokenizer: Any, prompt: Sequence[int], seed: int) -> str:
    """Return a text as the model would go on from a prompt, drawn with a seed."""
    torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    model.eval()
    out = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids).to(model.device),
        max_new_tokens=min(_SHOWN, model.config.max_position_embeddings - ids.shape[1]),
        do_sample=True,
        temperature=0.7,
        top_k=40,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.train()
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
