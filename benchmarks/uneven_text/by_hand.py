"""Loops without a library: the one that most people write, and the bound."""

from itertools import islice

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.uneven_text.setting import MAX_GRAD_NORM, Job


def plain(job: Job) -> None:
    """Train with fixed micro-batches; tokens are counted before, so that the mean is right."""
    loader = iter(job.loader())
    while micro_batches := list(islice(loader, job.setting.accumulation_steps)):
        predicted = sum((micro["labels"][:, 1:] != -100).sum() for micro in micro_batches)
        for micro in micro_batches:
            job.model(**micro, num_items_in_batch=predicted).loss.backward()
        _update(job)


def bound(job: Job) -> None:
    """Train on the same tokens one behind the other, cut into full rows: nothing is padded.

    As many rows as the cap admits make a micro-batch. What is left of an effective batch is a
    last, shorter row by itself. This is no way to train on samples, which would see each other.
    """
    size, length = job.setting.size, job.setting.max_length
    for start in range(0, len(job.samples), size):
        batch = job.samples[start : start + size]
        tokens = torch.tensor([token for sample in batch for token in sample["input_ids"]])
        full = tokens[: len(tokens) // length * length].view(-1, length)
        rest = tokens[full.numel() :]
        micro_batches = [*full.split(job.setting.micro_batch_size), rest.view(1, -1)]
        micro_batches = [rows for rows in micro_batches if rows.numel() > 1]
        predicted = torch.tensor(sum(rows[:, 1:].numel() for rows in micro_batches))
        for rows in micro_batches:
            job.model(input_ids=rows, labels=rows, num_items_in_batch=predicted).loss.backward()
        _update(job)


def _update(job: Job) -> None:
    clip_grad_norm_(job.model.parameters(), MAX_GRAD_NORM)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
