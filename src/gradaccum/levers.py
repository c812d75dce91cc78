"""What makes a sample need less memory, at the price of time: recompute instead of keep."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from gradaccum.errors import ArgumentError
from gradaccum.protocols import LossFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class Levers:
    """What is done so that a sample needs less memory. The update stays the same.

    Args:
        chunked_loss: The loss head runs over some labels at a time.
        checkpointing: Blocks are run again in the backward pass.
        parking: What autograd keeps is parked in host memory.
    """

    chunked_loss: bool = False
    checkpointing: bool = False
    parking: bool = False

    def __str__(self) -> str:
        names = [
            field.name.replace("_", " ") for field in fields(self) if getattr(self, field.name)
        ]
        return " + ".join(names) or "none"


def pulled(
    levers: Levers, model: nn.Module, loss: LossFunction, chunked_loss: LossFunction | None
) -> LossFunction:
    """Pull levers.

    Args:
        levers: Which.
        model: Its blocks are checkpointed in place, if that is among them.
        loss: ``loss(model, micro_batch)``.
        chunked_loss: The same with a head in chunks, where there is one.

    Returns:
        The loss that is to be taken.
    """
    if levers.checkpointing:
        checkpoint_blocks(model)
    chosen = chunked_loss if levers.chunked_loss and chunked_loss is not None else loss
    return parked(chosen) if levers.parking else chosen


def reached_for(*, chunked_loss: bool, blocks: bool, host: bool) -> list[Levers]:
    """Return none, and ever more levers, in the order in which they cost time.

    Args:
        chunked_loss: Whether there is a loss with a chunked head.
        blocks: Whether the model is stacked from blocks.
        host: Whether the device has a host to park on.

    Returns:
        Each with one lever more than the one before.
    """
    found = [Levers()]
    there = {"chunked_loss": chunked_loss, "checkpointing": blocks, "parking": host}
    for name in (name for name, can in there.items() if can):
        found.append(replace(found[-1], **{name: True}))
    return found


def parked(loss: LossFunction) -> LossFunction:
    """Return a loss whose saved tensors wait for the backward pass in pinned host memory.

    Args:
        loss: ``loss(model, micro_batch)`` on an accelerator; on a CPU there is nothing to gain.

    Returns:
        The same loss.
    """

    def through_host(model: Any, micro: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return loss(model, micro)

    return through_host


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model is stacked from, in order.

    Args:
        model: Any model.

    Returns:
        The modules of one class, at least two, that stand in a ``ModuleList`` or ``Sequential`` and
        have modules of their own: of the class that holds the most parameters. Empty if there is
        none.
    """
    groups: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for child in container:
                if any(child.children()) and not any(child is one for one in groups[type(child)]):
                    groups[type(child)].append(child)
    blocks = [group for group in groups.values() if len(group) > 1]
    return max(blocks, key=_parameters, default=[])


def checkpoint_blocks(model: nn.Module) -> int:
    """Let a model recompute its blocks in the backward pass, instead of keeping their activations.

    The update stays the same, dropout included, at a fifth to a third more time. Non-reentrant;
    running statistics, as of BatchNorm, move once. Parameters and `state_dict` stay as they are.

    Args:
        model: Changed in place.

    Returns:
        How many blocks there are. Those that are checkpointed already are left as they are.

    Raises:
        ArgumentError: The model is not stacked from blocks.
    """
    blocks = repeated_blocks(model)
    if not blocks:
        raise ArgumentError(
            f"checkpoint_blocks({type(model).__name__})",
            expected="at least two modules of one class, with modules of their own, in a "
            "ModuleList or a Sequential",
            got="none",
            remedy="Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in forward.",
        )
    for block in blocks:
        if not isinstance(vars(block).get("forward"), Checkpointed):
            block.forward = Checkpointed(block)
    return len(blocks)


class Checkpointed:
    """A block's forward that keeps its inputs alone.

    Args:
        block: Runs as it did.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._forward = block, block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; again in the backward pass, where there is one."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        contexts = partial(_contexts, self._block)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _buffers_kept(block)


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Put buffers back after a second run, so that they move once.

    Past autograd, which saves some of them and would take the change for a mistake.
    """
    kept = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)


def _parameters(blocks: Sequence[nn.Module]) -> int:
    return sum(p.numel() for block in blocks for p in block.parameters())
