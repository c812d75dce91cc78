"""Parameters of 16 bits that are updated in float32.

Where a parameter is 1.0 an update of 1e-3 is lost in bfloat16, whatever the gradient sums are. So
the optimizer is given float32 copies for the time of its step, with the gradient sums as they are,
and the parameters are rounded from them. Before and after, its parameter groups hold the model's
own parameters, as everybody expects.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradaccum.dtypes import Masters, narrower_than
from gradaccum.errors import ArgumentError

_BITS: Mapping[int, torch.dtype] = MappingProxyType({2: torch.int16, 4: torch.int32})
_KEY = "master_weight"  # of a copy, beside the state of its parameter in optimizer.state_dict()


class MasterWeights:
    """Float32 copies of parameters of 16 bits, and what an optimizer knows of them.

    A copy counts where it rounds to its parameter; elsewhere someone has changed the parameter
    (loaded weights, an edit in place), which then counts. That is looked at in each step, since
    changes by way of ``.data`` leave no trace in a parameter's version.

    Optimizer state is kept in float32. ``optimizer.state_dict()`` has the copies too, and
    ``optimizer.load_state_dict`` takes all as it was saved, where torch would round it to the
    dtype of the parameters.

    Args:
        optimizers: Hold the parameters.
        masters: Whether copies are kept. Where they are made for each step alone, parameters are
            rounded at random, up or down, so that on average nothing is lost.
        dtype: Of the copies; parameters as wide have none.

    Raises:
        ArgumentError: An optimizer has loaded copies already, which torch has rounded; or there
            are parameters for which there is no random rounding.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], masters: Masters, dtype: torch.dtype = torch.float32
    ) -> None:
        self._optimizers, self._masters, self._dtype = tuple(optimizers), masters, dtype
        self._narrower = narrower_than(dtype)
        self._kept: dict[Tensor, Tensor] = {}
        self._loading: Mapping[str, Any] = {}
        for optimizer in self._optimizers:
            _require_possible(optimizer, masters, self._narrower)
            optimizer.register_state_dict_post_hook(self._saved)
            optimizer.register_load_state_dict_pre_hook(self._note)
            optimizer.register_load_state_dict_post_hook(self._restore)

    @contextmanager
    def in_place(self, step: int) -> Iterator[None]:
        """Have optimizers hold the copies for one step; then round the parameters.

        Parameters without a gradient stay as they are. If the step fails, no parameter of 16 bits
        has moved.

        Args:
            step: Number of the optimizer step: rounding at random is a function of it, so that
                all ranks round alike, and a run that is resumed as one that was not stopped.
        """
        held: list[tuple[Tensor, Tensor]] = []
        try:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [
                        self._exchanged(optimizer, parameter, held) for parameter in group["params"]
                    ]
            yield
            self._round(held, step)
        finally:
            own = {copy: parameter for parameter, copy in held}
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [own.get(one, one) for one in group["params"]]
                for parameter, copy in held:
                    if copy in optimizer.state:
                        optimizer.state[parameter] = optimizer.state.pop(copy)
            for _, copy in held:
                copy.grad = None

    @torch.no_grad()
    def _exchanged(
        self, optimizer: Optimizer, parameter: Tensor, held: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the copy of a parameter that is to step, with its gradient and its state."""
        if parameter.grad is None or parameter.dtype not in self._narrower:
            return parameter
        copy = self._kept.get(parameter)
        if copy is None:
            copy = parameter.detach().to(self._dtype)
        else:
            # Compared as whole numbers: three times as fast on the CPU.
            bits = _BITS[parameter.dtype.itemsize]
            same = copy.to(parameter.dtype).view(bits) == parameter.view(bits)
            copy = torch.where(same, copy, parameter.to(self._dtype))
        if self._masters is Masters.KEPT:
            self._kept[parameter] = copy
        held.append((parameter, copy))
        copy.grad, parameter.grad = parameter.grad, None
        if parameter in optimizer.state:
            optimizer.state[copy] = optimizer.state.pop(parameter)
            self._widen(optimizer.state[copy])
        return copy

    def _widen(self, state: dict[Any, Any]) -> None:
        """Leave no tensor of 16 bits in the state of a parameter: some optimizers begin so."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in self._narrower:
                state[key] = value.to(self._dtype)

    @torch.no_grad()
    def _round(self, held: Sequence[tuple[Tensor, Tensor]], step: int) -> None:
        if self._masters is Masters.KEPT:
            torch._foreach_copy_([one for one, _ in held], [copy for _, copy in held])
            return
        generators: dict[torch.device, torch.Generator] = {}
        for parameter, copy in held:
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(step)
            parameter.copy_(rounded_at_random(copy, generators[parameter.device]))

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Add the copies to what is saved."""
        for k, parameter in _numbered(state, optimizer):
            if parameter in self._kept:
                of_it = state["state"].get(k, {})
                state["state"][k] = {**of_it, _KEY: self._kept[parameter]}

    def _note(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Keep what is about to be loaded, before it is rounded."""
        self._loading = state

    def _restore(self, optimizer: Optimizer) -> None:
        """Take what was loaded as it is."""
        loaded, self._loading = self._loading, {}
        for k, parameter in _numbered(loaded, optimizer):
            self._kept.pop(parameter, None)
            if parameter.dtype not in self._narrower:
                continue
            of_it = optimizer.state.get(parameter, {})
            for key, value in loaded["state"].get(k, {}).items():
                if isinstance(value, Tensor) and of_it[key].dtype in self._narrower:
                    of_it[key] = value.detach().to(parameter.device, self._dtype, copy=True)
            if (copy := of_it.pop(_KEY, None)) is not None and self._masters is Masters.KEPT:
                self._kept[parameter] = copy


def rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round to bfloat16, up or down at random, so that the mean of many roundings is the number.

    Bfloat16 is the upper half of a float32. A random lower half is added, and cut off.

    Args:
        values: Of any shape, in float32 or wider.
        generator: On the same device.

    Returns:
        The same values in bfloat16; what is not finite stays as it is.
    """
    bits = torch.randint(
        0, 1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device
    )
    bits.add_(values.float().view(torch.int32)).bitwise_and_(-1 << 16)
    rounded = bits.view(torch.float32).to(torch.bfloat16)
    return torch.where(values.isfinite(), rounded, values.to(torch.bfloat16))


def _require_possible(
    optimizer: Optimizer, masters: Masters, narrower: frozenset[torch.dtype]
) -> None:
    if any(_KEY in state for state in optimizer.state.values()):
        raise ArgumentError(
            "accumulator(model, optimizer, master_weights=True)",
            expected="an optimizer that loads its state afterwards",
            got="one that has loaded master weights before, which torch has rounded to 16 bits",
            remedy="Call optimizer.load_state_dict once the accumulator is built.",
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            dtype = parameter.dtype
            if masters is Masters.PASSING and dtype in narrower - {torch.bfloat16}:
                raise ArgumentError(
                    "accumulator(stochastic_rounding=True)",
                    expected="parameters of bfloat16, or as wide as their gradient sums",
                    got=f"one of {str(dtype).removeprefix('torch.')}",
                    remedy="Pass master_weights=True.",
                )


def _numbered(state: Mapping[str, Any], optimizer: Optimizer) -> Iterator[tuple[Any, Tensor]]:
    """Yield the parameters of an optimizer by the numbers that a saved state has for them."""
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(saved["params"], group["params"], strict=True)
