"""What is alive, and who looks."""

import weakref

from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

_LOOKS = {"item", "tolist", "__float__", "__int__", "__bool__", "__index__", "numpy", "cpu"}


class SavedTensors(saved_tensors_hooks):
    """Bytes that autograd keeps for backward: now, and at most."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        super().__init__(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor):
        kept = _Kept(tensor)
        size = tensor.numel() * tensor.element_size()
        self._moved(size)
        weakref.finalize(kept, self._moved, -size)
        return kept

    def _moved(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


class _Kept:
    def __init__(self, tensor) -> None:
        self.tensor = tensor


class Looks(TorchFunctionMode):
    """Notes each call that brings a tensor's value to Python, which waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in _LOOKS:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))
