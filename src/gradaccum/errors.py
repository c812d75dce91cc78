"""Errors. Each has the same four parts, and a class for each remedy that differs.

The parts are the call in the user's spelling, what was expected, what came, and what to do.
They are keyword arguments, so that none can be left out.
"""


class GradaccumError(Exception):
    """The base of every error that this library raises on purpose.

    Args:
        call: What was called or read, as the user wrote it: ``accumulator(micro_batch_size=0)``.
        expected: What would have been right.
        got: What came instead.
        remedy: What the user can do now; one imperative sentence.
    """

    def __init__(self, call: str, *, expected: str, got: str, remedy: str) -> None:
        self.call, self.expected, self.got, self.remedy = call, expected, got, remedy
        super().__init__(f"{call}: expected {expected}, got {got}. {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts when the error crosses a process border (a DataLoader worker)."""
        parts = {"expected": self.expected, "got": self.got, "remedy": self.remedy}
        return _rebuild, (type(self), self.call, parts)


def _rebuild(cls: type[GradaccumError], call: str, parts: dict[str, str]) -> GradaccumError:
    return cls(call, **parts)


class ArgumentError(GradaccumError, ValueError):
    """An argument has the wrong value, or two of them contradict each other."""


class LossError(GradaccumError, TypeError):
    """A loss function handed back something that is not a sum and its weight."""


class CollateError(GradaccumError, ValueError):
    """Samples cannot be put together into a micro-batch without guessing."""


class SampleTooLargeError(GradaccumError, ValueError):
    """One sample alone exceeds the cap of a micro-batch."""


class PredictionError(GradaccumError, RuntimeError):
    """A model or a loss cannot run on shapes alone, so its memory cannot be predicted."""


class DataError(GradaccumError, ValueError):
    """A file or a dataset of the user's cannot be read as samples."""


class NonFiniteError(GradaccumError, ArithmeticError):
    """The gradient of an effective batch is infinite or not a number."""


class CoupledError(GradaccumError, RuntimeError):
    """Micro-batches in lockstep do not meet at the same places."""


class PhaseError(GradaccumError, RuntimeError):
    """A call came at a time when it has no meaning, such as a backward outside a micro-batch."""
