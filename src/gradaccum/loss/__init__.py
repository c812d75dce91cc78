"""Losses as sums with weights."""

from gradaccum.loss import losses
from gradaccum.loss.tally import Mean, Tally, Terms
from gradaccum.loss.value import Loss, checked_terms

__all__ = ["Loss", "Mean", "Tally", "Terms", "checked_terms", "losses"]
