"""Micro-batches as virtual ranks: they run in turn, and meet where their samples interact.

Each runs the user's unchanged forward pass in a thread of its own, and exactly one at a time: a
baton goes round, always in the same order. At a meeting each brings its part and waits; when all
are there, what they make together is computed in the caller's thread, with a graph that reaches
all of them. Then one backward pass goes through the whole.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from gradaccum.coupled.lane import Lane
from gradaccum.coupled.thread_state import ThreadState
from gradaccum.errors import CoupledError

Micro = TypeVar("Micro")
Summed = TypeVar("Summed")

_MOST = 1 << 16  # threads: as many as there are micro-batches


class Lockstep:
    """Runs all micro-batches of an effective batch side by side, and one joint backward pass.

    The graph of the whole effective batch is held until then: on a CPU that takes as much memory
    as the full batch.

    Threads stay for the next effective batch, since torch's CPU kernels keep what they have
    prepared by thread: in fresh ones the forward passes of a small ResNet took three times as long.
    They end along with this object, or when something is raised.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def run(
        self,
        micro_batches: Iterable[Micro],
        forward: Callable[[Micro], Summed],
        backward: Callable[..., None],
    ) -> None:
        """Run all forward passes in lockstep, then backward once, with what they have returned.

        Whatever a forward pass raises goes on, with a note that names the micro-batch; one that
        takes another way than the others is a `CoupledError`. No thread is left in any case.
        """
        state, threads = (
            ThreadState.here(),
            self._threads or ThreadPoolExecutor(_MOST, "micro-batch"),
        )
        self._threads = threads
        lanes = [
            Lane(f"micro-batch {k}", partial(forward, micro), state, threads)
            for k, micro in enumerate(micro_batches)
        ]
        if not lanes:
            return
        try:
            _run_all(lanes)
            results = [lane.result for lane in lanes]
        except BaseException:
            for lane in lanes:
                lane.end()
            self._threads = None
            threads.shutdown()
            raise
        del lanes
        backward(*results)


def _run_all(lanes: Sequence[Lane]) -> None:
    """Give turns until all are done."""
    taken: Sequence[Any] = [None] * len(lanes)
    while True:
        for lane, own in zip(lanes, taken, strict=True):
            lane.turn(own)
            if lane.error is not None:
                lane.error.add_note(f"raised in {lane.name} of {len(lanes)}, in lockstep")
                raise lane.error
        if all(lane.done for lane in lanes):
            return
        taken = _met(lanes)


def _met(lanes: Sequence[Lane]) -> Sequence[Any]:
    """Return what each takes away from a meeting of all."""
    first, *others = lanes
    for lane in others:
        if _at(lane) != _at(first):
            raise CoupledError(
                f"meeting {max(first.meetings, lane.meetings)} of micro-batches in lockstep",
                expected="all of them at the same place",
                got=f"{first.name} {_at(first)}, and {lane.name} {_at(lane)}",
                remedy="Let each micro-batch take the same way through what couples samples: no "
                "branch on the data around a BatchNorm or a gradaccum.coupled function.",
            )
    meetings = [lane.meeting for lane in lanes if lane.meeting is not None]
    with torch.set_grad_enabled(meetings[0].grad):
        return meetings[0].joint([meeting.part for meeting in meetings])


def _at(lane: Lane) -> str:
    return "at its end" if lane.meeting is None else f"at {lane.meeting.place}"
