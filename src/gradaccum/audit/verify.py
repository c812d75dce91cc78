"""A look at a few small samples before the first step: do they leave each other alone?

Two questions, answered by forward passes alone. In the model's own mode, under the same random
numbers: is the loss of two samples a sum of what each contributes, whoever the other is? And with
layers in evaluation mode: is it the sum of their losses one by one?
"""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradaccum.batch import EffectiveBatch, LengthFunction, common_size, default_length
from gradaccum.errors import GradaccumError
from gradaccum.loss import Terms, checked_terms
from gradaccum.protocols import LossFunction
from gradaccum.snapshot import preserved
from gradaccum.tree import flat, leaves, map_leaves

_SEED = 0

Totals = dict[str, tuple[float, float]]


class CutInvarianceWarning(UserWarning):
    """The update will depend on how the effective batch is cut into micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Warns, once and by name, where samples of an effective batch interact.

    Leaves random generators, buffers, gradients and modes as they were. Two samples go through
    together, also where a micro-batch is to hold one.

    Args:
        model: What `loss` is called with.
        loss: ``loss(model, micro_batch)``.
        micro_batch: Makes a micro-batch on the device from positions in an effective batch.
        length: Length of a sample, by which small samples are found.
    """

    model: nn.Module
    loss: LossFunction
    micro_batch: Callable[[EffectiveBatch, list[int]], Any]
    length: LengthFunction = default_length

    def __call__(self, effective: EffectiveBatch) -> None:
        """Look at two of the smallest samples of an effective batch.

        Args:
            effective: Looked at if it has at least two samples.
        """
        chosen = self._small(effective)
        if len(chosen) < 2:
            return
        with preserved(self.model):
            message = self._message(effective, chosen)
        if message:
            warnings.warn(message, CutInvarianceWarning, stacklevel=5)  # where step is called

    def _message(self, effective: EffectiveBatch, chosen: list[int]) -> str | None:
        try:
            try:
                with torch.no_grad():
                    return self._found(effective, chosen)
            except RuntimeError:  # a loss may need gradients inside, as a gradient penalty does
                return self._found(effective, chosen)
        except GradaccumError:  # nothing that the step itself would not refuse
            raise
        except Exception as error:  # whatever a user's loss may raise
            return (
                "Whether samples interact could not be seen on two of them: the loss raises "
                f"{type(error).__name__}: {error} If it compares samples with each other, the "
                "update will depend on how the effective batch is cut. "
                'verify="never" leaves this look out.'
            )

    def _found(self, effective: EffectiveBatch, chosen: list[int]) -> str | None:
        pair = self.micro_batch(effective, chosen)
        return self._interaction(pair) or self._sums(effective, chosen, pair)

    def _small(self, effective: EffectiveBatch) -> list[int]:
        """Return the smallest sample and the next one that differs in length, if any does."""
        lengths = effective.lengths(self.length)
        if lengths is None:
            return list(range(min(2, len(effective))))
        order = np.argsort(lengths, kind="stable")
        longer = [int(k) for k in order if lengths[k] > lengths[order[0]]]
        return [int(order[0]), *(longer or [int(k) for k in order[1:]])[:1]]

    def _interaction(self, pair: Any) -> str | None:
        """Return what is wrong, if what one sample adds to the loss depends on the other.

        With f(a, b) the loss of a micro-batch of two, f(a, b) - f(b, b) - f(a, a) + f(b, a) is 0
        for every loss that is a sum over samples; layers draw the same numbers by position.

        Args:
            pair: A micro-batch of two samples.

        Returns:
            The message, or None.
        """
        if common_size(pair) != 2:
            return None  # not laid out by sample, as packed rows are: nothing can be exchanged
        one, two, three, four = (
            self._totals(_rows(pair, rows)) for rows in ([0, 1], [1, 1], [0, 0], [1, 0])
        )
        for name, (total, _) in one.items():
            found = [other.get(name, (0.0, 0.0))[0] for other in (two, three, four)]
            scale = abs(total) + sum(map(abs, found))
            if abs(total - found[0] - found[1] + found[2]) > self._tolerance() * scale:
                where = self._culprit(pair) or "the loss function"
                return (
                    f"Samples interact in {where}: what one adds to the loss of a micro-batch "
                    "depends on the others in it. The update will depend on how the effective "
                    f"batch is cut. {_remedy(where)}"
                )
        return None

    def _culprit(self, pair: Any) -> str | None:
        """Return the first module whose output for one sample depends on the other sample."""
        before, after = self._watched(_rows(pair, [0, 1])), self._watched(_rows(pair, [0, 0]))
        for name, (kind, first) in before.items():
            second = after.get(name, (kind, None))[1]
            if second is None or first.shape != second.shape:
                continue
            if not torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True):
                return f"{name} ({kind})" if name else f"the model itself ({kind})"
        return None

    def _watched(self, micro: Any) -> dict[str, tuple[str, Tensor]]:
        """Run a forward pass; return each module's output for sample 0, in order of the run."""
        seen: dict[str, tuple[str, Tensor]] = {}

        def note(name: str, module: nn.Module) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                tensors = (leaf for leaf in flat(output) if isinstance(leaf, Tensor))
                rows = [t for t in tensors if t.ndim and len(t) and len(t) % 2 == 0]
                if rows and rows[0].is_floating_point():
                    first = rows[0].detach().reshape(2, -1)[0].float().clone()
                    seen.setdefault(name, (type(module).__name__, first))

            return hook

        hooks = [m.register_forward_hook(note(n, m)) for n, m in self.model.named_modules()]
        try:
            self._loss(micro)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def _sums(self, effective: EffectiveBatch, chosen: Sequence[int], pair: Any) -> str | None:
        """Return what is wrong, if the loss of samples together is not the sum of their losses."""
        self.model.eval()  # random layers off; layers that interact in training were found before
        if not _same(pair, self.micro_batch(effective, list(chosen))):
            return None  # samples or collation draw anew each time, so that nothing can be compared
        together = self._totals(pair)
        try:
            alone = [self._totals(self.micro_batch(effective, [k])) for k in chosen]
        except Exception as error:  # whatever a user's loss may raise
            return (
                f"The loss of one sample alone raises {type(error).__name__}: {error} The update "
                "will depend on how the effective batch is cut, or fail where a micro-batch "
                "holds one sample."
            )
        for name, (total, weight) in together.items():
            found = [one.get(name, (0.0, 0.0)) for one in alone]
            others, weights = sum(s for s, _ in found), sum(w for _, w in found)
            term = f" {name!r}" if name else ""
            if abs(weight - weights) > self._tolerance() * max(abs(weight), abs(weights)):
                return (
                    f"The weight of the loss{term} is {weight:g} for {len(chosen)} samples "
                    f"together and {weights:g} for them one by one. Means over the effective "
                    "batch will depend on how it is cut. Count what the sum runs over: samples, "
                    "label tokens or pixels."
                )
            if abs(total - others) > self._tolerance() * max(abs(total), abs(others)):
                ratio = f"{total / others:.3g} times" if others else f"{total:.3g}, not 0,"
                return (
                    f"The summed loss{term} of {len(chosen)} samples together is {ratio} the sum "
                    "of their losses one by one. The update will depend on how the effective "
                    "batch is cut. If the loss is a mean, return its sum instead; if it compares "
                    "samples with each other, or padding changes a result, it needs them in one "
                    "micro-batch."
                )
        return None

    def _loss(self, micro: Any) -> Terms:
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        return checked_terms(self.loss(self.model, micro), call="loss(model, micro_batch)")

    def _totals(self, micro: Any) -> Totals:
        terms: Mapping[str, Any] = self._loss(micro)
        return {n: (float(t.sum.detach()), float(t.weight)) for n, t in terms.items()}

    def _tolerance(self) -> float:
        """Return how far sums may differ by rounding alone; the last is for bf16 and fp16."""
        kind = next((p.dtype for p in self.model.parameters()), torch.float32)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            kind = torch.bfloat16
        return {torch.float64: 1e-9, torch.float32: 1e-3}.get(kind, 5e-2)


def _rows(pair: Any, rows: list[int]) -> Any:
    return map_leaves(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, pair)


def _same(one: Any, other: Any) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=False)
    return all(
        not isinstance(a, Tensor) or (a.shape == b.shape and bool((a == b).all()))
        for (_, a), (_, b) in pairs
    )


def _remedy(where: str) -> str:
    if "BatchNorm" in where:
        return (
            "On a small ResNet with BatchNorm the gradient was 36% off the full batch's. "
            "Use GroupNorm or LayerNorm, or train with this layer in evaluation mode."
        )
    return "Make it treat each sample by itself, or let one micro-batch hold all samples."
