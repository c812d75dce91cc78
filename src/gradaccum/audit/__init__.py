"""Whether a model obeys the law on the user's own samples, and if not, where it breaks it."""

from gradaccum.audit.verify import CutInvarianceWarning, Verify

__all__ = ["CutInvarianceWarning", "Verify"]
