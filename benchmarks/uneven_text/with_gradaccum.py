"""gradaccum: the same effective batches, cut by length under a cap of tokens."""

from time import perf_counter
from typing import Any

import gradaccum as ga
from benchmarks.uneven_text.setting import MAX_GRAD_NORM, PAD, Job
from gradaccum.audit import Verify
from gradaccum.batch import Samples
from gradaccum.collate import collate_function
from gradaccum.feed import Feed
from gradaccum.partition import Cap, CappedCut


def loss(model: Any, micro: Any) -> ga.Loss:
    """Return the summed loss. Padding is on the right, where no earlier token can attend to it."""
    logits = model(input_ids=micro["input_ids"]).logits
    return ga.losses.causal_cross_entropy(logits, micro["labels"])


def step(job: Job) -> dict[str, Any]:
    """Train; afterwards, time the look at the first effective batch by itself."""
    samples = [{**sample, "labels": sample["input_ids"]} for sample in job.samples]
    pad = {"input_ids": PAD, "labels": -100}
    accumulator = ga.accumulator(
        job.model,
        job.optimizer,
        loss,
        micro_batch_tokens=job.setting.cap,
        max_grad_norm=MAX_GRAD_NORM,
        pad=pad,
    )
    lengths = [len(sample["input_ids"]) for sample in samples]
    for batch in ga.effective_batches(samples, job.setting.size, lengths=lengths, shuffle=False):
        report = accumulator.step(batch)
    feed = Feed(cut=CappedCut(cap=Cap(limit=job.setting.cap)), collate=collate_function(pad))
    check = Verify(model=job.model, loss=loss, micro_batch=feed.one)
    return {
        "micro_batches": report.micro_batches,
        "verify_seconds": _seconds(check, Samples(samples[: job.setting.size])),
    }


def _seconds(check: Verify, batch: Samples) -> float:
    begun = perf_counter()
    check(batch)
    return perf_counter() - begun
