"""Bytes: a budget, a meter of what is alive, a guard, and what a micro-batch will need."""

from gradaccum.memory.allocator import AllocatorBytes
from gradaccum.memory.budget import Budget
from gradaccum.memory.device import require_within, total_bytes, usable_bytes
from gradaccum.memory.guard import Enforced, guarded
from gradaccum.memory.meter import LiveBytes
from gradaccum.memory.model import Peaks, Probe, at_most, fit
from gradaccum.memory.needs import Needs, held_bytes, needs_of

__all__ = [
    "AllocatorBytes",
    "Budget",
    "Enforced",
    "LiveBytes",
    "Needs",
    "Peaks",
    "Probe",
    "at_most",
    "fit",
    "guarded",
    "held_bytes",
    "needs_of",
    "require_within",
    "total_bytes",
    "usable_bytes",
]
