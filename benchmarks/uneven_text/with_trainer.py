"""Hugging Face's Trainer: as it comes, with its own groupings by length, and with our sampler."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import gradaccum as ga
from benchmarks.uneven_text.setting import MAX_GRAD_NORM, Job, tokenizer


def in_order(job: Job) -> None:
    """Train on fixed micro-batches in the order of the samples, which is random."""
    _train(job, job.samples, "sequential")


def batch_rebalance(job: Job) -> None:
    """Train with the sampler that cuts each effective batch by length, into parts of like cost.

    It shuffles with a seed of its own. The samples are laid out so that they come in our order.
    """
    order = torch.randperm(len(job.samples), generator=torch.Generator().manual_seed(42)).tolist()
    laid_out: list[Any] = [None] * len(order)
    for sample, place in zip(job.samples, order, strict=True):
        laid_out[place] = sample
    _train(job, laid_out, "batch_rebalance")


def group_by_length(job: Job) -> None:
    """Train with the sampler that puts samples of like length into the same optimizer step.

    These are other effective batches than those of the other cases, out of all samples.
    """
    _train(job, job.everything, "group_by_length")


def gradaccum_sampler(job: Job) -> None:
    """Train on the same effective batches, each of them ordered by length before it is cut."""
    lengths = [len(sample["input_ids"]) for sample in job.samples]
    sampler = ga.EffectiveBatchSampler(
        lengths,
        size=job.setting.size,
        micro_batch_size=job.setting.micro_batch_size,
        shuffle=False,
    )

    class ByLength(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(
                self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    _train(job, job.samples, "sequential", ByLength)


def _train(
    job: Job, samples: list[Any], strategy: str, trainer: Callable[..., Trainer] = Trainer
) -> None:
    """Run the Trainer; it counts the labels of a step itself and hands them to the model."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=job.setting.micro_batch_size,
            gradient_accumulation_steps=job.setting.accumulation_steps,
            max_steps=job.setting.steps,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler_type="constant",
            train_sampling_strategy=strategy,
            use_cpu=True,
            dataloader_pin_memory=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer(
            model=job.model,
            args=arguments,
            train_dataset=samples,
            data_collator=job.collate(),
            processing_class=tokenizer(job.setting),
            optimizers=(job.optimizer, None),
        ).train()
