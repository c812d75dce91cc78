"""What a run of a model changes besides gradients: noted, and put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Snapshot:
    """The random generators and the buffers of a model, as they were when this was made.

    Generators are those of Python, numpy, torch on the CPU, and of each device that the model is
    on. Buffers are copied: BatchNorm's running statistics and its count of batches.

    Args:
        model: Its buffers and devices.
    """

    def __init__(self, model: nn.Module) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = [(device, _generator_state(device)) for device in _accelerators(model)]
        # A buffer that is None may be filled; one that is there is copied. (named_buffers is five
        # times slower.)
        self._buffers: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = [
            (module, name, None, None)
            if buffer is None
            else (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    def restore(self) -> None:
        """Put everything back; may be called again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            _set_generator_state(device, state)
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                # One that is expanded cannot be written to, and so it is as it was. (BatchNorm
                # moves its statistics without counting a version.)
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
                if module._buffers.get(name) is not buffer:
                    setattr(module, name, buffer)  # a forward had put another in its place


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Leave the modes of all modules, training or evaluation, as they were.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Leave generators, buffers and the modes of all modules as they were.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    snapshot = Snapshot(model)
    with modes_kept(model):
        try:
            yield
        finally:
            snapshot.restore()


def _accelerators(model: nn.Module) -> list[torch.device]:
    """Return the devices beside the CPU that a model's parameters are on, each once."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return []
    return list(dict.fromkeys(p.device for p in model.parameters() if p.device.type == kind.type))


def _generator_state(device: torch.device) -> Tensor:
    module: Any = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)
