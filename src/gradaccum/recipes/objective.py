"""One of several losses that are trained side by side, each with an optimizer of its own."""

from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from gradaccum.batch import WeighFunction
from gradaccum.protocols import LossFunction


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss, and what moves the parameters that it trains.

    Each objective of a recipe sums gradients of its own and makes an optimizer step of its own on
    each effective batch, one after the other in the order of the recipe; none touches the sums or
    the parameters of another.

    Args:
        name: Of it, in the metrics and on the screen; empty where there is one.
        loss: ``loss(model, micro_batch)``.
        optimizer: Holds the parameters of the model that this loss trains.
        chunked_loss: The same loss with a head in chunks, where that is possible.
        weigh: Weight of a sample in each term of the loss, where there are several.
        ema: An average of the weights that moves with each of its steps: `gradaccum.EMA` of the
            model, or of a part of it.
    """

    name: str = ""
    loss: LossFunction
    optimizer: Optimizer
    chunked_loss: LossFunction | None = None
    weigh: WeighFunction | None = None
    ema: AveragedModel | None = None
