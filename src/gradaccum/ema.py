"""An exponential moving average of weights, which moves only where the weights have moved."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradaccum.dtypes import narrower_than
from gradaccum.errors import ArgumentError


class EMA(AveragedModel):
    """torch's `AveragedModel` with a decay: ``average = decay * average + (1 - decay) * weights``.

    Given to `gradaccum.accumulator` as ``ema=``, it moves once for each optimizer step that really
    happened, however many micro-batches that took. The average is in `module`; buffers are copied.

    Unlike torch's, the first update averages as well, with the weights that it was made from; and
    weights of 16 bits are averaged in float32, since a thousandth more would be lost in them.

    Args:
        model: Whose weights are averaged: the model that is trained, or a part of it.
        decay: What is kept of the average in each update, in [0, 1).
        use_buffers: Whether buffers are averaged, not copied.

    Raises:
        ArgumentError: The decay is outside of [0, 1).
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False
    ) -> None:
        if not (isinstance(decay, (int, float)) and 0 <= decay < 1):
            raise ArgumentError(
                f"EMA(model, decay={decay!r})",
                expected="a share of at least 0 and less than 1",
                got=repr(decay),
                remedy="Pass what is kept of the average in each update, 0.999 for example.",
            )
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers)
        self.n_averaged.fill_(1)
        narrow = narrower_than(torch.float32)
        self._widened = False
        for average in (*self.module.parameters(), *self.module.buffers()):
            if average.dtype in narrow:
                average.data, self._widened = average.data.float(), True
        self._source = (model,)  # in a tuple, so that it is no module of this one

    @property
    def source(self) -> nn.Module:
        """The module whose weights are averaged."""
        return self._source[0]

    def update_parameters(self, model: nn.Module) -> None:
        """Move the average.

        Args:
            model: The one that is averaged.
        """
        super().update_parameters(_Wide(model) if self._widened else model)


class _Wide(nn.Module):
    """A model as the average sees it: nothing of 16 bits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of = (model,)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of the model, at least in float32."""
        for parameter in self._of[0].parameters(recurse):
            yield nn.Parameter(_wide(parameter.detach()), requires_grad=False)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the buffers of the model, at least in float32."""
        yield from map(_wide, self._of[0].buffers(recurse))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in narrower_than(torch.float32) else tensor
