"""Small models, with samples, for the law: each a micro-batch loss and a loss of one sample."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradaccum as ga

VOCABULARY = 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, samples drawn from a generator, and its loss in two forms."""

    name: str
    model: Callable[[], nn.Module]
    sample: Callable[[np.random.Generator], Any]
    loss: Callable[[nn.Module, Any], ga.Loss]
    sample_loss: Callable[[nn.Module, Any], tuple[Tensor, float]]
    pad: Any = None


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def _regression_sample(rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    weights = rng.integers(0, 3, 2) * rng.random(2)  # some are 0
    return tuple(torch.from_numpy(v) for v in (rng.normal(size=3), rng.normal(size=2), weights))


def _regression_loss(model: nn.Module, micro: tuple[Tensor, Tensor, Tensor]) -> ga.Loss:
    inputs, targets, weights = micro
    return ga.losses.mse_loss(model(inputs), targets, weights=weights)


def _regression_sample_loss(model: nn.Module, sample: Any) -> tuple[Tensor, float]:
    inputs, targets, weights = sample
    return (weights * (model(inputs) - targets) ** 2).sum(), weights.sum().item()


class TinyTransformer(nn.Module):
    """One block of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.place = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[-1]))
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(-3, -2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(mixed.transpose(-3, -2).flatten(-2)))


def _text_sample(rng: np.random.Generator) -> dict[str, Tensor]:
    ids = torch.from_numpy(rng.integers(1, VOCABULARY, rng.integers(1, 10)))
    ignored = torch.from_numpy(rng.random(len(ids)) < 0.3)
    if rng.random() < 0.15:
        ignored[:] = True  # a sample without a label
    return {"input_ids": ids, "labels": torch.where(ignored, -100, ids)}


def _causal_loss(model: nn.Module, micro: dict[str, Tensor]) -> ga.Loss:
    return ga.losses.causal_cross_entropy(model(micro["input_ids"]), micro["labels"])


def _causal_sample_loss(model: nn.Module, sample: dict[str, Tensor]) -> tuple[Tensor, float]:
    log_p = model(sample["input_ids"][None])[0].log_softmax(-1)
    total, weight = log_p.sum() * 0, 0
    for t, label in enumerate(sample["labels"].tolist()[1:]):
        if label != -100:
            total, weight = total - log_p[t, label], weight + 1
    return total, weight


def _embedding() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 6), nn.RMSNorm(6), nn.GELU(), nn.Linear(6, VOCABULARY)
    )


def _masked_loss(model: nn.Module, micro: dict[str, Tensor]) -> ga.Loss:
    return ga.losses.cross_entropy(model(micro["input_ids"]), micro["labels"])


def _masked_sample_loss(model: nn.Module, sample: dict[str, Tensor]) -> tuple[Tensor, float]:
    kept = sample["labels"] != -100
    log_p = model(sample["input_ids"]).log_softmax(-1)[kept]
    return -log_p[range(len(log_p)), sample["labels"][kept]].sum(), int(kept.sum())


_PAD = {"input_ids": 0, "labels": -100}

CASES = [
    Case(
        name="mlp",
        model=_mlp,
        sample=_regression_sample,
        loss=_regression_loss,
        sample_loss=_regression_sample_loss,
    ),
    Case(
        name="transformer",
        model=TinyTransformer,
        sample=_text_sample,
        loss=_causal_loss,
        sample_loss=_causal_sample_loss,
        pad=_PAD,
    ),
    Case(
        name="embedding",
        model=_embedding,
        sample=_text_sample,
        loss=_masked_loss,
        sample_loss=_masked_sample_loss,
        pad=_PAD,
    ),
]
