"""The loss of an effective batch while its micro-batches come in, and its mean at the end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isclose, nan
from types import MappingProxyType

import torch
from torch import Tensor

from gradaccum.errors import LossError
from gradaccum.loss.value import Loss
from gradaccum.outcome import Term

Terms = Mapping[str, Loss]


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


def _wide(loss: Loss) -> Loss:
    """Return a loss in double precision, where the device has it, for others to be added to."""
    kind = torch.float32 if loss.sum.device.type == "mps" else torch.float64
    weight = loss.weight
    if isinstance(weight, Tensor):
        weight = weight.to(loss.sum.device, kind)
    return Loss(loss.sum.to(kind), weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    r"""Sums of a loss and its weights over the micro-batches so far, without their graphs.

    A lone term's gradient is added undivided; its one division comes at the step, and this is
    what `Mean.divisor` says. Of several terms, which have weights of their own, the gradient of
    :math:`\sum_t s_t / W_t` is added; the weights :math:`W_t` of the whole effective batch must
    then be known beforehand.

    Args:
        sums: Sums by term so far; the name of a lone term is "".
        weighed: Weights of the whole effective batch by term, if it was weighed beforehand.
    """

    sums: Terms = field(default_factory=lambda: MappingProxyType({}))
    weighed: Mapping[str, float] | None = None

    @property
    def _divides(self) -> bool:
        return self.weighed is not None and len(self.weighed) > 1

    def plus(self, terms: Terms) -> "Tally":
        """Return the sums with one more micro-batch; a term that it lacks adds nothing.

        Args:
            terms: Its terms.

        Returns:
            A new tally.
        """
        added = dict(self.sums)
        for name, term in terms.items():
            weight = term.weight.detach() if isinstance(term.weight, Tensor) else term.weight
            before = added.get(name)
            added[name] = (
                _wide(Loss(term.sum.detach(), weight))
                if before is None
                else Loss(before.sum + term.sum.detach(), before.weight + weight)
            )
        return Tally(sums=added, weighed=self.weighed)

    def differentiable(self, terms: Terms) -> Tensor:
        """Return the tensor whose gradient a micro-batch adds.

        Args:
            terms: Its terms.

        Returns:
            0-dimensional tensor.

        Raises:
            LossError: There are several terms, and the effective batch was not weighed.
        """
        if (
            not self._divides
            and len(terms) == 1
            and (not self.sums or terms.keys() == self.sums.keys())
        ):
            return next(iter(terms.values())).sum
        names = {*self.sums, *terms}
        if missing := names - set(self.weighed or {}):
            raise LossError(
                f"a loss with the terms {', '.join(sorted(names))}",
                expected="the weight of the whole effective batch in each term, known beforehand",
                got=f"none for {', '.join(sorted(missing))}",
                remedy="Pass accumulator(..., weigh=lambda sample: {name: weight, ...}).",
            )
        weights = self.weighed or {}
        return torch.stack(
            [
                term.sum / weights[name] if weights[name] else term.sum * 0
                for name, term in terms.items()
            ]
        ).sum()

    def mean(
        self, total: Callable[[Tensor], Tensor], norm: Tensor | None = None
    ) -> tuple[Mean, float]:
        """Return the mean over all ranks, and a norm beside it: the one wait for the device.

        Args:
            total: Sums a tensor over ranks.
            norm: 0-dimensional tensor that is brought to the host along with the sums.

        Returns:
            The mean, and the norm as a number (0 if none was given).
        """
        if not self.sums:
            return Mean(loss=nan, divisor=0.0, terms={}), 0.0
        parts = [loss.sum for loss in self.sums.values()]
        parts += [torch.as_tensor(loss.weight).to(parts[0]) for loss in self.sums.values()]
        numbers = total(torch.stack(parts))
        if norm is not None:
            numbers = torch.cat([numbers, norm.detach().to(numbers).reshape(1)])
        found = numbers.tolist()
        count = len(self.sums)
        weights = dict(zip(self.sums, found[count : 2 * count], strict=True))
        self._compare(weights)
        means = {
            name: number / weights[name] if weights[name] else 0.0
            for name, number in zip(self.sums, found[:count], strict=True)
        }
        empty = not any(weights.values())
        divisor = 1.0 if self._divides and not empty else sum(weights.values())
        return (
            Mean(
                loss=nan if empty else sum(means.values()),
                divisor=divisor,
                terms={n: Term(loss=means[n], weight=weights[n]) for n in means if n},
            ),
            found[-1] if norm is not None else 0.0,
        )

    def _compare(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            if not weight >= 0:
                raise LossError(
                    f"weight of the loss{f' {name!r}' if name else ''}",
                    expected="a number of at least 0 from every micro-batch",
                    got="a negative one or NaN from at least one",
                    remedy="Count the samples, label tokens or pixels that the sum runs over.",
                )
        if self.weighed is None:
            return
        for name in {**self.weighed, **weights}:
            before, after = self.weighed.get(name, 0.0), weights.get(name, 0.0)
            if not isclose(before, after, rel_tol=1e-5, abs_tol=1e-9):
                raise LossError(
                    f"weigh(sample){f'[{name!r}]' if name else ''}",
                    expected="the weights that the loss function hands back",
                    got=f"{before:g} by weigh and {after:g} by the loss",
                    remedy="Make both count the same samples or labels.",
                )
