"""How many bytes of tensors are alive, and how many there were at most.

On a CPU nothing counts them, so a dispatch mode does: it sees every operation, those of the
backward pass included, and follows each storage from the operation that made it to its end. What
an operation needs inside itself and gives back before it returns is not seen; only the logits of
one chunk are added where torch's cross-entropy in chunks runs.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradaccum.tree import flat


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are alive. Costs time in every operation.

    Storages that were made before it was entered count from `follow` on, or from the first
    operation that hands out a view of them.

    Args:
        limit: Called with the live bytes whenever an operation has added to them; may raise.
        device: Count storages on this device alone; None for all.

    Attributes:
        live: Bytes that are alive now.
        peak: The most that were.
        timeline: Live bytes after each operation since it was entered.
    """

    def __init__(
        self,
        limit: Callable[[int], None] | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._limit, self._device = limit, device
        self.timeline = array("q")
        self._alive: dict[ReferenceType[Any], int] = {}
        self.live = 0
        self.peak = 0

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors that are there already, each once.

        Args:
            tensors: Parameters, buffers, optimizer state, a batch.
        """
        for tensor in tensors:
            self._note(tensor)

    def reset_peak(self) -> None:
        """Begin anew: the peak is what is alive now."""
        self.peak = self.live

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count what it hands back."""
        result = func(*args, **(kwargs or {}))
        before = self.live
        for leaf in flat(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        most = self.live + _inside(func, args)
        self.peak = max(self.peak, most)
        self.timeline.append(most)
        if self._limit is not None and most > before:
            self._limit(most)
        return result

    def _note(self, tensor: Tensor) -> None:
        if self._device is not None and tensor.device != self._device:
            return
        if tensor.layout != torch.strided:
            for part in (tensor._indices(), tensor._values()):
                self._note(part)
            return
        storage = tensor.untyped_storage()
        key = ref(storage, self._forget)
        if key in self._alive:
            return
        self._alive[key] = size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: "ReferenceType[Any]") -> None:
        self.live -= self._alive.pop(key, 0)


def _inside(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operation takes and gives back, where they are known."""
    if func._schema.name != "torch_nn::_linear_cross_entropy_batch_chunked":
        return 0
    hidden, weight, chunk = args[0], args[1], args[8]
    return int(chunk * weight.shape[0] * max(hidden.element_size(), 4))
