"""Bytes: a budget, a meter of what is alive, and a guard that enforces the one by the other."""

from gradaccum.memory.budget import Budget
from gradaccum.memory.guard import guarded
from gradaccum.memory.meter import LiveBytes

__all__ = ["Budget", "LiveBytes", "guarded"]
