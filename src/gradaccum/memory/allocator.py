"""What CUDA's caching allocator counts, kernels' own buffers included."""

from types import TracebackType
from typing import Self

import torch


class AllocatorBytes:
    """Counts the bytes that a CUDA device's allocator hands out. Costs nothing.

    Entering it resets the device's peak statistics.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    @property
    def live(self) -> int:
        """Bytes of tensors that are there now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        """The most bytes of tensors that were there at once."""
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def reserved(self) -> int:
        """The most bytes that the allocator held of the device, fragments included."""
        return torch.cuda.max_memory_reserved(self._device)
