"""The samples, and the gradient that every case is compared with."""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.uneven_text.setting import Setting, build, reference_path, save


def run(case: str, **settings: Any) -> dict[str, Any]:
    """Make the samples or the reference; return a few words about them."""
    setting = Setting(**settings)
    return _samples(setting) if case == "samples" else _reference(setting)


def _samples(setting: Setting) -> dict[str, Any]:
    """Encode the functions of Python's standard library."""
    from gradaccum.recipes.text.encode import encode
    from gradaccum.recipes.text.stdlib import functions
    from gradaccum.recipes.text.tokenizer import train_tokenizer

    texts = functions()
    tokenizer = train_tokenizer(texts, vocab_size=setting.vocabulary)
    samples = encode(tokenizer, texts, max_length=setting.max_length)
    tokenizer.save_pretrained(Path(setting.folder, "tokenizer"))
    save(setting, samples)
    lengths = torch.tensor([float(len(sample)) for sample in samples])
    shares = torch.tensor([0.1, 0.5, 0.9, 0.99])
    return {
        "num_samples": len(samples),
        "mean_tokens": float(lengths.mean()),
        "quantiles_tokens": dict(
            zip(("10%", "50%", "90%", "99%"), lengths.quantile(shares).tolist(), strict=True)
        ),
    }


def _reference(setting: Setting) -> dict[str, Any]:
    """Compute the gradient of the first effective batch in float64.

    Sample by sample, so there is no padding, no mask and no micro-batch; the sum of all losses
    is divided by the number of predicted tokens. Nothing of gradaccum takes part.
    """
    job = build(setting, torch.float64)
    batch = job.samples[: setting.size]
    for sample in batch:
        ids = torch.tensor([sample["input_ids"]])
        logits = job.model(input_ids=ids).logits
        functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    predicted = sum(len(sample["input_ids"]) - 1 for sample in batch)
    gradients = {name: p.grad / predicted for name, p in job.model.named_parameters()}
    torch.save(gradients, reference_path(setting))
    return {"predicted_tokens": predicted, "parameters": sum(g.numel() for g in gradients.values())}
