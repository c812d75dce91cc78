"""What all cases share: sizes, samples, model, optimizer, and the collate function of the peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling
from transformers import PreTrainedTokenizerFast as Tokenizer

from benchmarks.models import gpt

# High enough never to act, so the gradient that an optimizer sees is the normalised one in every
# case; the work of clipping is done all the same.
MAX_GRAD_NORM = 100.0
PAD = 0  # of the tokenizer; no sample holds it, so what is not PAD is real


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of the benchmark.

    Args:
        folder: Where `prepare` put the samples and the tokenizer.
        steps: Optimizer steps, the first of which warms up.
        size: Samples in an effective batch.
        micro_batch_size: Samples in a micro-batch, where it is fixed.
        max_length: Tokens of a sample at most.
        width: Of the model.
        layers: Of the model.
        vocabulary: Tokens that the tokenizer knows.
    """

    folder: str
    steps: int
    size: int
    micro_batch_size: int
    max_length: int
    width: int
    layers: int
    vocabulary: int

    @property
    def cap(self) -> int:
        """Tokens in a micro-batch at most, padding included."""
        return self.micro_batch_size * self.max_length

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches in an effective batch, where their size is fixed."""
        return self.size // self.micro_batch_size


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a case trains: ``steps`` effective batches of the samples, in the order they have.

    Args:
        setting: The sizes.
        model: The model.
        optimizer: Its optimizer.
        samples: Those of the measured steps: token ids under ``"input_ids"``.
        everything: All samples there are, in another order.
    """

    setting: Setting
    model: nn.Module
    optimizer: Optimizer
    samples: list[dict[str, Any]]
    everything: list[dict[str, Any]]

    def collate(self) -> Callable[[list[Any]], dict[str, torch.Tensor]]:
        """Return the usual collate function for causal language models.

        It pads to the longest sample of a micro-batch and makes an attention mask and labels.
        """
        return DataCollatorForLanguageModeling(tokenizer(self.setting), mlm=False)

    def loader(self) -> DataLoader[Any]:
        """Return fixed micro-batches in the order of the samples, which is random."""
        return DataLoader(
            self.samples,  # type: ignore[arg-type]
            batch_size=self.setting.micro_batch_size,
            collate_fn=self.collate(),
        )


def build(setting: Setting, dtype: torch.dtype = torch.float32) -> Job:
    """Build the same model, optimizer and samples in every process."""
    torch.manual_seed(0)
    model = gpt(
        vocabulary=setting.vocabulary,
        max_length=setting.max_length,
        width=setting.width,
        layers=setting.layers,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=PAD,
    ).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    everything = [{"input_ids": ids} for ids in load(setting)]
    return Job(
        setting=setting,
        model=model,
        optimizer=optimizer,
        samples=everything[: setting.steps * setting.size],
        everything=everything,
    )


def tokenizer(setting: Setting) -> Tokenizer:
    """Load the tokenizer."""
    return Tokenizer.from_pretrained(Path(setting.folder, "tokenizer"))


def save(setting: Setting, samples: list[list[int]]) -> None:
    """Store all samples in one array with their ends beside it."""
    ends = np.cumsum([len(sample) for sample in samples])
    np.savez(Path(setting.folder, "samples.npz"), ids=np.concatenate(samples), ends=ends)


def load(setting: Setting) -> list[list[int]]:
    """Load all samples, in random order."""
    with np.load(Path(setting.folder, "samples.npz")) as stored:
        parts = np.split(stored["ids"], stored["ends"][:-1])
    order = np.random.default_rng(0).permutation(len(parts))
    return [parts[k].tolist() for k in order]


def reference_path(setting: Setting) -> Path:
    """Return where the gradient of the first effective batch in float64 is kept."""
    return Path(setting.folder, "reference.pt")
