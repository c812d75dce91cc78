"""The loss of an effective batch while its micro-batches come in, and its mean at the end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose, nan

import torch
from torch import Tensor

from gradaccum.errors import LossError
from gradaccum.loss.value import Loss
from gradaccum.outcome import Term

Terms = Mapping[str, Loss]
Totals = Mapping[tuple[str, str], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """The mean loss over an effective batch.

    Args:
        loss: ``sum_i s_i / sum_i w_i``, summed over the terms; NaN if nothing carries weight.
        divisor: What the gradient sums are still to be divided by; 0 if nothing carries weight.
        terms: The named terms.
    """

    loss: float
    divisor: float
    terms: Mapping[str, Term]


class Tally:
    r"""Sums of a loss and its weights over the micro-batches so far, without their graphs.

    A lone term's gradient is added undivided; its one division comes at the step, and this is
    what `Mean.divisor` says. Of several terms, which have weights of their own, the gradient of
    :math:`\sum_t s_t / W_t` is added; the weights :math:`W_t` of the whole effective batch must
    then be known beforehand.

    Of a micro-batch its numbers alone are kept, as they are: adding them up in double precision
    waits for the end, since each addition on the way costs as much as a small layer.

    Args:
        weighed: Weights of the whole effective batch by term, if it was weighed beforehand.
    """

    def __init__(self, weighed: Mapping[str, float] | None = None) -> None:
        self._weighed = weighed
        self.divides = weighed is not None and len(weighed) > 1
        self._sums: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[Tensor | float]] = {}

    def add(self, terms: Terms) -> None:
        """Add the numbers of a micro-batch; a term that it lacks adds nothing.

        Args:
            terms: Its terms.
        """
        for name, term in terms.items():
            weight = term.weight.detach() if isinstance(term.weight, Tensor) else term.weight
            self._sums.setdefault(name, []).append(term.sum.detach())
            self._weights.setdefault(name, []).append(weight)

    def nonfinite(self) -> list[int]:
        """Return the micro-batches whose loss is infinite or not a number, counted from 0."""
        found = [k for sums in self._sums.values() for k, s in enumerate(sums) if not s.isfinite()]
        return sorted(set(found))

    def differentiable(self, terms: Terms) -> Tensor:
        """Return the tensor whose gradient a micro-batch adds.

        Args:
            terms: Its terms.

        Returns:
            0-dimensional tensor.

        Raises:
            LossError: There are several terms, and the effective batch was not weighed.
        """
        known = not self._sums or self._sums.keys() == terms.keys()
        if known and len(terms) == 1 and not self.divides:
            return next(iter(terms.values())).sum
        weights, names = self._weighed or {}, {*self._sums, *terms}
        if missing := names - set(weights):
            raise LossError(
                f"a loss with the terms {', '.join(sorted(names))}",
                expected="the weight of the whole effective batch in each term, known beforehand",
                got=f"none for {', '.join(sorted(missing))}",
                remedy="Pass accumulator(..., weigh=lambda sample: {name: weight, ...}).",
            )
        return torch.stack(
            [
                term.sum / weights[name] if weights[name] else term.sum * 0
                for name, term in terms.items()
            ]
        ).sum()

    def mean(
        self, totals: Callable[[Totals], Totals], beside: Tensor | None = None
    ) -> tuple[Mean, list[float]]:
        """Return the mean over all ranks, and what is told beside it: the one wait for the device.

        Args:
            totals: Sums numbers over ranks.
            beside: ``(k,)`` numbers of this rank that are brought to the host along with the sums.

        Returns:
            The mean, and the numbers.
        """
        told, numbers = self._told(beside)
        told = totals(told)
        sums = {name: number for (what, name), number in told.items() if what == "sum"}
        weights = {name: number for (what, name), number in told.items() if what == "weight"}
        return self._mean(sums, weights), numbers

    def _told(self, beside: Tensor | None) -> tuple[Totals, list[float]]:
        """Return the sums and weights of this rank on the host, and what is told beside them."""
        if not self._sums:
            return {}, [] if beside is None else beside.tolist()
        sums = torch.stack([_total(numbers) for numbers in self._sums.values()])
        weights = [_weight(numbers, like=sums) for numbers in self._weights.values()]
        numbers = torch.cat([sums, torch.stack(weights)])
        if beside is not None:
            numbers = torch.cat([numbers, beside.detach().to(numbers)])
        found = numbers.tolist()
        keys = [(what, name) for what in ("sum", "weight") for name in self._sums]
        return dict(zip(keys, found, strict=False)), found[len(keys) :]

    def _mean(self, sums: Mapping[str, float], weights: Mapping[str, float]) -> Mean:
        if not sums:
            return Mean(loss=nan, divisor=0.0, terms={})
        self._compare(weights)
        means = {name: sums[name] / weights[name] if weights[name] else 0.0 for name in sums}
        named = {name: Term(loss=means[name], weight=weights[name]) for name in means if name}
        if not any(weights.values()):
            return Mean(loss=nan, divisor=0.0, terms=named)
        divisor = 1.0 if len(weights) > 1 or self.divides else sum(weights.values())
        return Mean(loss=sum(means.values()), divisor=divisor, terms=named)

    def _compare(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            if not weight >= 0:
                raise LossError(
                    f"weight of the loss{f' {name!r}' if name else ''}",
                    expected="a number of at least 0 from every micro-batch",
                    got="a negative one or NaN from at least one",
                    remedy="Count the samples, label tokens or pixels that the sum runs over.",
                )
        if self._weighed is None:
            return
        for name in {**self._weighed, **weights}:
            before, after = self._weighed.get(name, 0.0), weights.get(name, 0.0)
            if not isclose(before, after, rel_tol=1e-5, abs_tol=1e-9):
                raise LossError(
                    f"weigh(sample){f'[{name!r}]' if name else ''}",
                    expected="the weights that the loss function hands back",
                    got=f"{before:g} by weigh and {after:g} by the loss",
                    remedy="Make both count the same samples or labels.",
                )


def _total(numbers: list[Tensor]) -> Tensor:
    """Return a sum in double precision, where the device has it."""
    kind = torch.float32 if numbers[0].device.type == "mps" else torch.float64
    return torch.stack(numbers).sum(dtype=kind)


def _weight(numbers: list[Tensor | float], *, like: Tensor) -> Tensor:
    plain = sum(number for number in numbers if not isinstance(number, Tensor))
    tensors = [number.to(like.device) for number in numbers if isinstance(number, Tensor)]
    if not tensors:
        return torch.tensor(plain, dtype=like.dtype, device=like.device)
    return torch.stack(tensors).sum(dtype=like.dtype) + plain
