"""Cutting effective batches: how long it takes, and how much padding is left.

The lengths are those of functions of Python's standard library in tokens, drawn with replacement;
the cut is the cheapest under a cap of tokens in a micro-batch. Fixed micro-batches that hold as
much under the cap are beside it, in random order and ordered by length.
"""

from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import run_case, table, verdict

CAP, MAX_LENGTH = 2048, 512
TARGETS = {64: 0.95, 256: 0.96, 4096: 0.995}


def measure(*, quick: bool) -> dict[str, Any]:
    """Run the case in its own process."""
    settings = {"num_samples": 20_480 if quick else 1_000_000, "vocabulary": 512 if quick else 4096}
    return {"settings": settings, "result": run_case("partition", "partition", **settings)}


def run(case: str, *, num_samples: int, vocabulary: int) -> dict[str, Any]:
    """Cut the same samples at each size of the effective batch."""
    lengths = _lengths(num_samples, vocabulary)
    return {
        "num_samples": num_samples,
        "mean_tokens": float(lengths.mean()),
        "by_size": {size: _cut_all(lengths, size) for size in TARGETS},
    }


def _lengths(num_samples: int, vocabulary: int) -> np.ndarray:
    from gradaccum.recipes.text.encode import encode
    from gradaccum.recipes.text.stdlib import functions
    from gradaccum.recipes.text.tokenizer import train_tokenizer

    texts = functions()
    tokenizer = train_tokenizer(texts, vocab_size=vocabulary)
    found = [len(ids) for ids in encode(tokenizer, texts, max_length=MAX_LENGTH)]
    return np.random.default_rng(0).choice(np.array(found), num_samples)


def _cut_all(lengths: np.ndarray, size: int) -> dict[str, float]:
    from gradaccum.partition import optimal

    batches = [lengths[k : k + size] for k in range(0, len(lengths), size)]
    seconds = []
    for _ in range(3):
        begun = perf_counter()
        plans = [optimal(batch, CAP) for batch in batches]
        seconds.append(perf_counter() - begun)
    tokens = int(lengths.sum())
    return {
        "seconds_per_million": median(seconds) * 1e6 / len(lengths),
        "real_share": tokens / sum(plan.padded_tokens for plan in plans),
        "micro_batches": sum(map(len, plans)) / len(plans),
        "fixed_by_length": tokens / sum(_padded(-np.sort(-batch)) for batch in batches),
        "fixed_random": tokens / sum(_padded(batch) for batch in batches),
        "fixed_micro_batches": size * MAX_LENGTH / CAP,
    }


def _padded(lengths: np.ndarray) -> int:
    """Return the tokens computed in fixed micro-batches that the cap admits at any length."""
    size = CAP // MAX_LENGTH
    parts = [lengths[k : k + size] for k in range(0, len(lengths), size)]
    return sum(len(part) * int(part.max()) for part in parts)


def section(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page that tell this benchmark."""
    found = result["result"]
    if "failed" in found:
        return ["Failed."]
    rows = []
    for size, one in found["by_size"].items():
        target = TARGETS[int(size)]
        rows.append(
            [
                f"{int(size):,}",
                f"{one['real_share']:.1%}",
                f"{target:.1%}: {verdict(one['real_share'], target, at_least=True)}",
                f"{one['micro_batches']:.0f}",
                f"{one['fixed_random']:.1%}",
                f"{one['fixed_by_length']:.1%}",
                f"{one['fixed_micro_batches']:.0f}",
                f"{one['seconds_per_million']:.2f}",
            ]
        )
    head = [
        "effective batch, samples",
        "real tokens of all computed",
        "target",
        "micro-batches",
        "fixed size, random order",
        "fixed size, by length",
        "micro-batches of fixed size",
        "seconds per million samples",
    ]
    return [
        f"{found['num_samples']:,} samples of {found['mean_tokens']:.0f} tokens in the mean and "
        f"{MAX_LENGTH} at most; micro-batches hold at most {CAP:,} tokens.",
        "",
        *table(head, rows),
    ]
