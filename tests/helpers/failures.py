"""Memory that runs out where a test says so."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FailAt(TorchDispatchMode):
    """Raises in place of one operation, forward or backward, once.

    Args:
        number: Which operation, from 0; None for none.
        error: What is raised.
    """

    def __init__(self, number=None, error=None) -> None:
        super().__init__()
        self.number, self.error = number, error or torch.OutOfMemoryError("injected")
        self.operations = 0
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        here, self.operations = self.operations, self.operations + 1
        self.names.append(str(func))
        if here == self.number:
            raise self.error
        return func(*args, **(kwargs or {}))


class Full(TorchDispatchMode):
    """Raises whenever a tensor appears whose first dimension is above a number of samples.

    Args:
        most: Samples that fit.
        width: Second dimension of the tensors that are looked at; None for all.
    """

    def __init__(self, most, width=None) -> None:
        super().__init__()
        self.most, self.width, self.raised = most, width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shape = getattr(out, "shape", ())
        if len(shape) > 1 and shape[0] > self.most and self.width in {None, shape[1]}:
            self.raised += 1
            raise torch.OutOfMemoryError(f"no room for {tuple(shape)}")
        return out
