"""A small GPT-2 with random weights, and its loss in one piece and in chunks."""

import transformers

import gradaccum as ga


def gpt(*, dropout=0.0, device="cpu", **changed):
    config = {
        "vocab_size": 120,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 2,
        "attn_pdrop": dropout,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(**(config | changed))
    return transformers.GPT2LMHeadModel(config).to(device).train()


def causal(model, micro):
    logits = model(input_ids=micro["input_ids"], use_cache=False).logits
    return ga.losses.causal_cross_entropy(logits, micro["labels"])


def chunked(model, micro):
    hidden = model.transformer(input_ids=micro["input_ids"], use_cache=False).last_hidden_state
    return ga.losses.causal_linear_cross_entropy(hidden, model.lm_head.weight, micro["labels"])
