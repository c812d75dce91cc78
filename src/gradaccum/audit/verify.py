"""A look at a handful of small samples before the first step: do they leave each other alone?

Two questions, forward passes only. In training mode with the same random numbers: when one
sample is exchanged for another, do the outputs of its neighbour change? And with layers in
evaluation mode: is the summed loss of samples together the sum of their losses one by one?
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradaccum.batch import EffectiveBatch, LengthFunction, default_length
from gradaccum.loss import Tally, checked_terms
from gradaccum.protocols import LossFunction
from gradaccum.rng import preserved
from gradaccum.tree import leaves

_SEED = 0


class CutInvarianceWarning(UserWarning):
    """The update will depend on how the effective batch is cut into micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Warns, once and by name, where samples of an effective batch interact.

    Leaves random generators, buffers, gradients and modes as they were.

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
        """Look at the smallest samples of an effective batch.

        Args:
            effective: Looked at if it has at least two samples.
        """
        chosen = self._smallest(effective)
        if len(chosen) < 2:
            return
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        # Gradients stay enabled, since a loss may need them inside (a gradient penalty).
        with preserved(device), _unchanged(self.model):
            message = self._interaction(effective, chosen) or self._sums(effective, chosen)
        if message:
            warnings.warn(message, CutInvarianceWarning, stacklevel=3)

    def _smallest(self, effective: EffectiveBatch) -> list[int]:
        lengths = effective.lengths(self.length)
        if lengths is None:
            return list(range(min(3, len(effective))))
        return [int(k) for k in np.argsort(lengths, kind="stable")[:3]]

    def _interaction(self, effective: EffectiveBatch, chosen: Sequence[int]) -> str | None:
        """Exchange a sample's neighbour for another; return what is wrong if its outputs change."""
        one, other = chosen[0], chosen[-1]  # both stay in, so the padded shape is the same
        before = self._watched(self.micro_batch(effective, [one, other, other]))
        after = self._watched(self.micro_batch(effective, [one, one, other]))
        for name, (kind, first) in before.items():
            second = after.get(name, (kind, None))[1]
            if second is None or first.shape != second.shape:
                continue
            if not torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True):
                where = f"{name} ({kind})" if name else f"the model itself ({kind})"
                return (
                    f"Samples interact in {where}: exchanging one sample of a micro-batch changes "
                    "the outputs of another. The update will depend on how the effective batch is "
                    "cut; on a small ResNet with BatchNorm the gradient was 36% off the full "
                    f"batch's. {_remedy(kind)}"
                )
        return None

    def _watched(self, micro: Any) -> dict[str, tuple[str, Tensor]]:
        """Run a forward pass; return each module's output for sample 0, in order of the run."""
        seen: dict[str, tuple[str, Tensor]] = {}

        def note(name: str, module: nn.Module) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                tensors = (leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor))
                rows = [t for t in tensors if t.ndim and len(t) and len(t) % 3 == 0]
                if rows and rows[0].is_floating_point():
                    first = rows[0].detach().reshape(3, -1)[0].float().clone()
                    seen.setdefault(name, (type(module).__name__, first))

            return hook

        hooks = [m.register_forward_hook(note(n, m)) for n, m in self.model.named_modules()]
        try:
            torch.manual_seed(_SEED)
            self.loss(self.model, micro)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def _sums(self, effective: EffectiveBatch, chosen: Sequence[int]) -> str | None:
        """Compare samples together with samples one by one; return what is wrong with it."""
        self.model.eval()  # random layers off; layers that interact in training were found before
        together, kind = self._totals([self.micro_batch(effective, list(chosen))])
        try:
            apart, _ = self._totals(self.micro_batch(effective, [k]) for k in chosen)
        except Exception as error:  # whatever a user's loss may raise
            return (
                f"The loss of one sample alone raises {type(error).__name__}: {error} The update "
                "will depend on how the effective batch is cut, or fail where a micro-batch "
                "holds one sample."
            )
        # of sums that differ by rounding alone; the last is for bf16, fp16 and autocast
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(kind, 5e-2)
        for name, (total, weight) in together.items():
            others, weights = apart.get(name, (0.0, 0.0))
            term = f" {name!r}" if name else ""
            if abs(weight - weights) > tolerance * max(abs(weight), abs(weights)):
                return (
                    f"The weight of the loss{term} is {weight:g} for {len(chosen)} samples "
                    f"together and {weights:g} for them one by one. Means over the effective "
                    "batch will depend on how it is cut. Count what the sum runs over: samples, "
                    "label tokens or pixels."
                )
            if abs(total - others) > tolerance * max(abs(total), abs(others)):
                ratio = total / others if others else float("inf")
                return (
                    f"The summed loss{term} of {len(chosen)} samples together is {ratio:.3g} "
                    "times the sum of their losses one by one. The update will depend on how the "
                    "effective batch is cut. If the loss is a mean, return its sum instead; if "
                    "it compares samples with each other, or padding changes a result, it needs "
                    "them in one micro-batch."
                )
        return None

    def _totals(self, micros: Any) -> tuple[dict[str, tuple[float, float]], torch.dtype]:
        tally = Tally()
        kind = torch.float32
        for micro in micros:
            terms = checked_terms(self.loss(self.model, micro), call="loss(model, micro_batch)")
            kind = next(iter(terms.values())).sum.dtype
            tally = tally.plus(terms)
        return {n: (float(s.sum), float(s.weight)) for n, s in tally.sums.items()}, kind


def _remedy(kind: str) -> str:
    if "BatchNorm" in kind:
        return "Use GroupNorm or LayerNorm, or train with this layer in evaluation mode."
    return "Make it treat each sample by itself, or let one micro-batch hold all samples."


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put the buffers and the modes of a model back."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)  # a forward may have put another in its place
        for module, mode in modes:
            module.training = mode
