"""How long a device takes: a micro-batch, run in earnest under each of the levers."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from time import perf_counter
from typing import Any

import numpy as np
import torch

from gradaccum.collate import to_device
from gradaccum.levers import Levers, pulled
from gradaccum.loss import Tally, checked_terms
from gradaccum.planner import Subject

_TOKENS = 1024  # of the micro-batch, about
_WARM, _TIMED = 2, 5  # runs of it


def seconds_per_flop(
    subject: Subject, device: torch.device, every: Sequence[Levers]
) -> list[float]:
    """Return the seconds of a floating-point operation, from a micro-batch run in earnest.

    In rounds over all levers, so that a busy machine is busy for all of them; the fastest counts.

    Args:
        subject: What is planned for; nothing of it is changed.
        device: Is here.
        every: Levers.

    Returns:
        Seconds, for each of the levers.
    """
    positions = _timed_positions(subject)
    micro = to_device(subject.feed.peek(subject.batches[0].samples, positions.tolist()), device)
    runs = [_run_of(subject, device, levers, micro) for levers in every]
    seconds = [[_seconds(run, device) for run in runs] for _ in range(_WARM + _TIMED)]
    fastest = np.min(seconds[_WARM:], axis=0)
    return [float(fastest[k]) / _flops(subject, one, positions) for k, one in enumerate(every)]


def _flops(subject: Subject, levers: Levers, positions: np.ndarray) -> int:
    trial = subject.trial(levers)
    with trial.opened():
        trial.probe(positions)
    return max(trial.work[-1].flops, 1)


def _run_of(
    subject: Subject, device: torch.device, levers: Levers, micro: Any
) -> Callable[[], None]:
    """Return a forward and backward pass under some levers."""
    model = deepcopy(subject.model).to(device)
    loss = pulled(levers, model, subject.loss, subject.chunked_loss)
    weighed = subject.batches[0].weighed

    def run() -> None:
        terms = checked_terms(loss(model, micro), call="loss(model, micro_batch)")
        torch.autograd.backward(Tally(weighed).differentiable(terms))

    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    started = perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return perf_counter() - started


def _timed_positions(subject: Subject) -> np.ndarray:
    """Return samples of middling length, about a thousand tokens of them."""
    first = subject.batches[0]
    lengths = first.lengths
    if lengths is None:
        return np.arange(min(4, len(first.samples)))
    order = np.argsort(lengths, kind="stable")
    middle = len(order) // 2
    count = max(1, min(_TOKENS // max(int(lengths[order[middle]]), 1), len(order) // 2))
    return order[middle - count // 2 : middle - count // 2 + count]
