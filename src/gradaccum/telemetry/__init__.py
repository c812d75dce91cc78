"""What becomes of the reports: a live display, and files. Knows no accumulator."""

from gradaccum.telemetry.progress import track
from gradaccum.telemetry.sinks import JsonLines

__all__ = ["JsonLines", "track"]
