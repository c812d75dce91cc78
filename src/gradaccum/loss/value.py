"""A loss as a sum and what it must be divided by."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradaccum.dtypes import narrower_than
from gradaccum.errors import LossError

_LOSS_REMEDY = (
    "Sum the losses instead of averaging them, and count what they are to be divided by: "
    "Loss(losses.sum(), weight=losses.numel()), or one of gradaccum.losses."
)


@dataclass(frozen=True, slots=True)
class Loss:
    r"""The summed loss of some samples, and its weight; their mean is ``sum / weight``.

    Sums are added over micro-batches and divided once, at the optimizer step, so the mean over an
    effective batch is the same however it was cut:
    :math:`L = \sum_i s_i / \sum_i w_i`.

    Args:
        sum: 0-dimensional tensor, differentiable, not yet divided by anything.
        weight: What the sum is divided by: samples, label tokens, pixels. A number, or a
            0-dimensional tensor, at least 0. No gradient flows through it.

    >>> import torch
    >>> Loss.of(torch.tensor([1.0, 2.0, 6.0]), weights=torch.tensor([1.0, 1.0, 0.0])).mean()
    tensor(1.5000)
    """

    sum: Tensor
    weight: Tensor | float

    @classmethod
    def of(cls, values: Tensor, weights: Tensor | None = None) -> "Loss":
        """Build a loss from elementwise losses.

        Args:
            values: Losses of any shape, one for each sample, token or pixel.
            weights: Weights of the same shape, such as a 0/1 mask; by default 1 each. Where the
                weight is 0 the value does not count, even if it is not finite.

        Returns:
            ``Loss((values * weights).sum(), weights.sum())``, in float32 where they have 16 bits: a
            bfloat16 counts 1,001 tokens as 1,000, and a float16 none beyond 65,504.

        Raises:
            LossError: The shapes differ.
        """
        if weights is None:
            return cls(summed(values), values.numel())
        if weights.shape != values.shape:
            raise LossError(
                "Loss.of(values, weights)",
                expected="weights of the shape of the values",
                got=f"{tuple(weights.shape)} for values of {tuple(values.shape)}",
                remedy="Expand the weights: weights.expand_as(values).",
            )
        kept = torch.where(weights != 0, values, torch.zeros_like(values))
        return cls(summed(kept * weights), summed(weights.detach()))

    def __add__(self, other: object) -> NoReturn:
        """Refuse: adding the weights as well would halve two losses of the same samples."""
        raise LossError(
            "Loss + Loss",
            expected="terms that each keep their own weight",
            got="two losses to be made one",
            remedy='Return a mapping, {"ce": ce, "aux": 0.1 * aux}, and pass weigh=; or, where '
            "both have the same weight, Loss(ce.sum + 0.1 * aux.sum, ce.weight).",
        )

    def __mul__(self, factor: float) -> "Loss":
        """Scale the loss, not its weight: ``0.01 * auxiliary``."""
        return Loss(self.sum * factor, self.weight)

    __rmul__ = __mul__

    def mean(self) -> Tensor:
        """Return ``sum / weight``."""
        return self.sum / self.weight


def summed(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of values, at least in float32.

    Args:
        values: Of any shape.
        dim: What is summed over; by default all of it.

    Returns:
        The sum.
    """
    narrow = values.dtype in narrower_than(torch.float32)
    return values.sum(dim, dtype=torch.float32 if narrow else None)


def checked(loss: Any, *, call: str) -> Loss:
    """Return `loss` if it is a valid `Loss`.

    Values on an accelerator are not looked at, since that would wait for it: a bad weight there
    makes the total weight NaN, which is refused before the update.

    Args:
        loss: What the user's loss function handed back, or one of its terms.
        call: The call in the user's spelling, for messages.

    Returns:
        The loss.

    Raises:
        LossError: It is no `Loss`, the sum is not a floating-point scalar tensor, or the weight
            is negative, NaN or not a scalar.
    """
    if not isinstance(loss, Loss):
        raise LossError(
            call, expected="a gradaccum.Loss(sum, weight)", got=_told(loss), remedy=_LOSS_REMEDY
        )
    total, weight = loss.sum, loss.weight
    if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
        raise LossError(
            f"{call} -> Loss(sum=...)",
            expected="a 0-dimensional floating-point tensor",
            got=_told(total),
            remedy=_LOSS_REMEDY,
        )
    if isinstance(weight, Tensor):
        scalar = weight.ndim == 0
        if scalar and weight.device.type != "cpu":
            return Loss(total, torch.where(weight >= 0, weight, torch.nan))
    else:
        scalar = isinstance(weight, (int, float, Real))
    if not scalar or not isfinite(weight) or weight < 0:
        raise LossError(
            f"{call} -> Loss(weight=...)",
            expected="one number of at least 0: what the summed loss is divided by",
            got=_told(weight),
            remedy="Count the samples, label tokens or pixels that the sum runs over.",
        )
    return loss


def checked_terms(result: Any, *, call: str) -> Mapping[str, Loss]:
    """Return what a loss function handed back as terms by name; the name of a lone loss is "".

    Args:
        result: A `Loss`, or a mapping of names to them.
        call: The call in the user's spelling, for messages.

    Returns:
        The terms.

    Raises:
        LossError: A term is not a valid `Loss`, or there is none.
    """
    if isinstance(result, Loss) or not isinstance(result, Mapping):
        return {"": checked(result, call=call)}
    if not result:
        got = "an empty mapping"
        raise LossError(call, expected="at least one term", got=got, remedy=_LOSS_REMEDY)
    return {str(name): checked(term, call=f"{call}[{name!r}]") for name, term in result.items()}


def _told(value: Any) -> str:
    if isinstance(value, Tensor) and value.ndim:
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    return f"{value!r} of type {type(value).__name__}"
