"""Hugging Face Accelerate, in the two ways that its documentation has."""

from itertools import islice

from accelerate import Accelerator

from benchmarks.uneven_text.setting import MAX_GRAD_NORM, Job


def weighted(job: Job) -> None:
    """Train as the guide says for samples of variable size.

    It reads the micro-batches of a step first, counts their labels, and undoes the division by
    the accumulation steps. It counts all labels, also the first of each sample, which is never
    predicted; so its gradient is a little too small.

    https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
    """
    steps = job.setting.accumulation_steps
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    micro_batches = iter(loader)
    while window := list(islice(micro_batches, steps)):
        labels = accelerator.gather(sum((micro["labels"] != -100).sum() for micro in window))
        total = labels.sum().item()
        for micro in window:
            loss = model(**micro, num_items_in_batch=total).loss
            accelerator.backward(loss * steps * accelerator.num_processes)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()


def accumulate(job: Job) -> None:
    """Train with ``accelerator.accumulate``: a mean over micro-batches of means over tokens."""
    steps = job.setting.accumulation_steps
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader())
    for micro in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**micro).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
