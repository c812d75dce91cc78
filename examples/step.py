"""Train a small GPT with one call per optimizer step.

    python examples/step.py

You say which samples make an optimizer step (64) and how many tokens fit on the device at once
(2,048); how the 64 are cut, ordered and padded is the library's business, and does not change
the update.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gradaccum as ga
from gradaccum.recipes.text.encode import encode
from gradaccum.recipes.text.stdlib import functions
from gradaccum.recipes.text.tokenizer import train_tokenizer

texts = functions()[:400]
tokenizer = train_tokenizer(texts, vocab_size=512)
dataset = [{"input_ids": ids, "labels": ids} for ids in encode(tokenizer, texts, max_length=256)]

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=256,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def loss(model, micro):
    """Return the summed cross-entropy of a micro-batch, and how many tokens it predicts."""
    logits = model(micro["input_ids"]).logits  # right padding, causal attention: no mask needed
    return ga.losses.causal_cross_entropy(logits, micro["labels"])


batches = ga.effective_batches(
    dataset, 64, lengths=[len(sample["input_ids"]) for sample in dataset], epochs=2
)
accumulator = ga.accumulator(
    model,
    optimizer,
    loss,
    max_grad_norm=1.0,
    memory="200MiB",  # what a step may use; by default what the device has free
    pad={"input_ids": 0, "labels": -100},
)

for batch in ga.track(batches, accumulator):
    report = accumulator.step(batch)

print(f"loss {report.loss:.3f}, gradient norm {report.grad_norm:.3f}, {accumulator.counters}")
