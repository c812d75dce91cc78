"""One micro-batch in a thread of its own, which runs only while it holds the baton."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

from gradaccum.coupled.thread_state import ThreadState


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Meeting:
    """What a micro-batch brings to a place where samples interact.

    Args:
        place: What must be the same for all that meet.
        part: What this one brings.
        joint: From the parts of all, in their order, to what each takes away.
        grad: Whether gradients are enabled there.
    """

    place: str
    part: Any
    joint: Callable[[Sequence[Any]], Sequence[Any]]
    grad: bool


class Lane:
    """Runs something until it meets others, or is done; then waits for its next turn.

    Args:
        name: What it is called in messages.
        work: What it runs.
        state: What torch keeps for each thread, taken over from the caller.
        threads: Has a thread for it.
    """

    def __init__(
        self, name: str, work: Callable[[], Any], state: ThreadState, threads: Executor
    ) -> None:
        self.name = name
        self.meeting: Meeting | None = None
        self.meetings = 0
        self.done, self.result = False, None
        self.error: BaseException | None = None
        self._work, self._state = work, state
        self._taken: Any = None
        self._ended = False  # by the others' end
        self._go, self._pause = Lock(), Lock()  # held until one lets the other go on
        self._go.acquire()
        self._pause.acquire()
        self._threads = threads
        self._thread: Future[None] | None = None

    def turn(self, taken: Any = None) -> None:
        """Let it run until its next meeting or its end.

        Args:
            taken: What it takes away from the last meeting.
        """
        self._taken, self.meeting = taken, None
        if self._thread is None:
            self._thread = self._threads.submit(self._main)
        else:
            self._go.release()
        self._pause.acquire()

    def end(self) -> None:
        """Let it unwind, if it waits, and wait until nothing of it runs."""
        if self._thread is not None:
            self._ended = True
            if not self._thread.done() and self._go.locked():
                self._go.release()
            wait([self._thread])
        self._taken = self.meeting = None

    def meet(self, meeting: Meeting) -> Any:
        """Wait for the others, in this lane's thread.

        Returns:
            What it takes away.

        Raises:
            EndedError: The effective batch is over.
        """
        self.meeting = meeting
        self.meetings += 1
        del meeting
        self._pause.release()
        self._go.acquire()
        if self._ended:
            raise EndedError
        taken, self._taken = self._taken, None
        return taken

    def _main(self) -> None:
        before = _LANE.set(self)
        try:
            with self._state.taken_over():
                self.result = self._work()
            self.done = True
        except EndedError:
            pass
        except BaseException as error:  # goes on in the caller's thread
            self.error = error
        finally:
            del self._work
            _LANE.reset(before)
            if self._pause.locked():  # else nobody waits: the caller was interrupted
                self._pause.release()


class EndedError(BaseException):
    """Unwinds a lane whose effective batch is over; not for a user's ``except Exception``."""


_LANE: ContextVar[Lane | None] = ContextVar("lane", default=None)


def current_lane() -> Lane | None:
    """Return the lane of this thread; None outside of lockstep."""
    return _LANE.get()
