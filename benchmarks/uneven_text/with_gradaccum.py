"""gradaccum: the same effective batches, cut by length under a cap of tokens."""

from statistics import median
from time import perf_counter
from typing import Any

import gradaccum as ga
from benchmarks.uneven_text.setting import MAX_GRAD_NORM, PAD, Job, build


def loss(model: Any, micro: Any) -> ga.Loss:
    """Return the summed loss. Padding is on the right, where no earlier token can attend to it."""
    logits = model(input_ids=micro["input_ids"]).logits
    return ga.losses.causal_cross_entropy(logits, micro["labels"])


def step(job: Job) -> dict[str, Any]:
    """Train; afterwards, time the look at the first effective batch by itself."""
    samples = [{**sample, "labels": sample["input_ids"]} for sample in job.samples]
    accumulator = _accumulator(job, "first")
    lengths = [len(sample["input_ids"]) for sample in samples]
    for batch in ga.effective_batches(samples, job.setting.size, lengths=lengths, shuffle=False):
        report = accumulator.step(batch)
    return {
        "micro_batches": report.micro_batches,
        "verify_seconds": _verify_seconds(build(job.setting), samples[: job.setting.size]),
    }


def _accumulator(job: Job, verify: Any) -> ga.Accumulator:
    return ga.accumulator(
        job.model,
        job.optimizer,
        loss,
        micro_batch_tokens=job.setting.cap,
        max_grad_norm=MAX_GRAD_NORM,
        pad={"input_ids": PAD, "labels": -100},
        verify=verify,
    )


def _verify_seconds(job: Job, batch: list[Any]) -> float:
    """Time steps of the three shortest samples, which it looks at, with it and without it."""
    shortest = sorted(batch, key=lambda sample: len(sample["input_ids"]))[:3]
    seconds: dict[str, list[float]] = {"first": [], "never": []}
    for _ in range(5):
        for verify, found in seconds.items():
            accumulator = _accumulator(job, verify)
            begun = perf_counter()
            accumulator.step(shortest)
            found.append(perf_counter() - begun)
    return median(seconds["first"]) - median(seconds["never"])
