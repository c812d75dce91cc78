"""What torch keeps for each thread by itself, carried into another."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ThreadState:
    """Gradient mode, autocast, modes (a default device is one), saved-tensor hooks and stream.

    Args:
        grad: Whether gradients are enabled.
        autocast: Keyword arguments of ``torch.autocast`` by device type.
        functions: Function modes, the innermost last.
        dispatch: Dispatch modes, the innermost last.
        hooks: The saved-tensor hooks, if there are some.
        stream: The stream of the accelerator, if there is one.
    """

    grad: bool
    autocast: tuple[dict[str, Any], ...]
    functions: tuple[TorchFunctionMode, ...]
    dispatch: tuple[TorchDispatchMode, ...]
    hooks: tuple[Any, Any] | None
    stream: torch.Stream | None

    @classmethod
    def here(cls) -> "ThreadState":
        """Return the state of this thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return cls(
            grad=torch.is_grad_enabled(),
            autocast=tuple(
                {
                    "device_type": kind,
                    "dtype": torch.get_autocast_dtype(kind),
                    "enabled": torch.is_autocast_enabled(kind),
                    "cache_enabled": torch.is_autocast_cache_enabled(),
                }
                for kind in kinds
            ),
            functions=tuple(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            dispatch=tuple(_get_current_dispatch_mode_stack()),
            hooks=torch._C._autograd._top_saved_tensors_default_hooks(True),
            stream=None if accelerator is None else torch.accelerator.current_stream(),
        )

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Return a context in which this thread has that state."""
        with ExitStack() as held:
            if self.stream is not None:
                held.enter_context(self.stream)
            held.enter_context(torch.set_grad_enabled(self.grad))
            for one in self.autocast:
                held.enter_context(torch.autocast(**one))
            if self.hooks is not None:
                held.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.hooks))
            # Entered as they are: they are the caller's, who leaves them.
            for function in self.functions:
                _push_function_mode(function)  # type: ignore[no-untyped-call]
                held.callback(_pop_function_mode)
            for mode in self.dispatch:
                _push_mode(mode)
                held.callback(_pop_mode)
            yield
