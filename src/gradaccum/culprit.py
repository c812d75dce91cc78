"""Where a loss or a gradient that is not finite came from: which samples, and the first module."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradaccum.feed import Feed
from gradaccum.loss import Tally, Terms
from gradaccum.partition import Partition
from gradaccum.prepared import Prepared
from gradaccum.snapshot import preserved
from gradaccum.tree import flat

_NAMED = 5  # samples, at most


class Culprit:
    """Runs the micro-batches of an effective batch once more, and looks at every module.

    Args:
        model: Its random generators, buffers and modes are put back.
        feed: Collates micro-batches.
        forward: From a micro-batch to its loss.
    """

    def __init__(self, *, model: nn.Module, feed: Feed, forward: Callable[[Any], Terms]) -> None:
        self._model, self._feed, self._forward = model, feed, forward

    def __call__(self, prepared: Prepared, plan: Partition) -> str:
        """Say where it came from.

        Args:
            prepared: The effective batch.
            plan: How it was cut.

        Returns:
            A few words.
        """
        with preserved(self._model), torch.enable_grad():
            for k, positions in enumerate(plan):
                if (place := self._place(prepared, positions)) is None:
                    continue
                alone = [p for p in positions if self._place(prepared, np.array([p])) is not None]
                named = [prepared.samples.name(int(p)) for p in alone or positions]
                more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
                samples = ", ".join(named[:_NAMED]) + more
                return f"from {samples} (micro-batch {k}), first in {place}"
        return "not seen when the same samples were run again"

    def _place(self, prepared: Prepared, positions: np.ndarray) -> str | None:
        """Return where some samples make a number that is not finite; None if they do not."""
        micro = self._feed.peek(prepared.samples, positions.tolist())
        with _seen(self._model) as seen:
            terms = self._forward(micro)
        total = Tally(prepared.weighed).differentiable(terms)
        if not _finite([total]):
            return seen.first or "the loss function"
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        if not total.requires_grad:
            return None
        gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
        bad = [
            name
            for (name, _), gradient in zip(named, gradients, strict=True)
            if gradient is not None and not _finite([gradient])
        ]
        # A gradient flows from the end: the module that ran last is the nearest to where it began.
        last = max(bad, key=lambda name: seen.place_of(name.rpartition(".")[0]), default=None)
        return None if last is None else f"the gradient of {last!r}"


class _Seen:
    """What a forward pass showed: the modules in the order in which they ended."""

    def __init__(self) -> None:
        self.first: str | None = None
        self._order: list[str] = []

    def note(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._order.append(path)
        if self.first is not None or _finite(flat(output)):
            return
        name = f"{path or 'the model'!r} ({type(module).__name__})"
        own = [n for n, p in module.named_parameters(recurse=False) if not _finite([p])]
        if own:
            self.first = f"{name}, whose {own[0]} is not finite"
        elif not _finite(flat(inputs)):
            self.first = f"the input of {name}"
        else:
            self.first = name

    def place_of(self, path: str) -> int:
        return max((k for k, one in enumerate(self._order) if one == path), default=-1)


@contextmanager
def _seen(model: nn.Module) -> Iterator[_Seen]:
    """Look at what goes into and comes out of every module."""
    seen = _Seen()
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, output, path=path: seen.note(
                path, module, (args, kwargs), output
            ),
            with_kwargs=True,
        )
        for path, module in model.named_modules()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _finite(values: Sequence[Any] | Iterator[Any]) -> bool:
    tensors = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
