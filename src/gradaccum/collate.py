"""Putting samples together into a micro-batch: stack what is equal, pad what is told to be padded.

A sample is a tree whose leaves are tensors, arrays, numbers or lists of numbers. Nothing is
guessed: leaves of unequal shape that no padding value was given for are an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradaccum.errors import ArgumentError, CollateError
from gradaccum.tree import flat, leaves, map_leaves, map_with_path

CollateFunction = Callable[[list[Any]], Any]
"""From a list of samples to a micro-batch."""

Side = Literal["right", "left"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collate:
    """The default collate function.

    Args:
        pad: Padding value by path of the leaf: ``{"input_ids": 0, "labels": -100}``; leaves are
            padded along their first dimension to the longest in the micro-batch.
        side: Where padding goes.
    """

    pad: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    side: Side = "right"

    def __call__(self, samples: list[Any]) -> Any:
        """Put samples together.

        Args:
            samples: At least one tree; all have the same structure.

        Returns:
            The tree with ``(len(samples), ...)`` tensors at its leaves; leaves that are no
            numbers, such as strings, come as a list.
        """
        return map_with_path(self._stack, *samples)

    def _stack(self, path: str, *found: Any) -> Any:
        if not isinstance(found[0], (Tensor, np.ndarray, np.generic, int, float, list)):
            return list(found)
        if isinstance(found[0], (int, float)):
            return torch.tensor(found)
        tensors = [torch.as_tensor(leaf) for leaf in found]
        shapes = {tensor.shape for tensor in tensors}
        if len(shapes) == 1:
            return torch.stack(tensors)
        if path not in self.pad or len({shape[1:] for shape in shapes}) > 1:
            raise CollateError(
                f"collating {path or 'the samples'!r} of {len(found)} samples",
                expected="one shape, or a padding value and shapes that differ in the first "
                "dimension only",
                got=f"shapes {', '.join(sorted(str(tuple(shape)) for shape in shapes)[:4])}",
                remedy=f"Pass pad={{{path!r}: value}}, pad=tokenizer, or a collate function.",
            )
        return self._padded(tensors, self.pad[path])

    def _padded(self, tensors: Sequence[Tensor], value: float) -> Tensor:
        longest = max(len(tensor) for tensor in tensors)
        first = tensors[0]
        kinds = [tensor.dtype for tensor in tensors if tensor.numel()]  # [] alone would be float
        out = torch.full(
            (len(tensors), longest, *first.shape[1:]),
            value,
            dtype=reduce(torch.promote_types, kinds),
            device=first.device,
        )
        for row, tensor in zip(out, tensors, strict=True):
            if self.side == "right":
                row[: len(tensor)] = tensor
            else:
                row[longest - len(tensor) :] = tensor
        return out


def collate_function(pad: Any = None) -> Collate:
    """Build the default collate function from a padding mapping or a tokenizer.

    Args:
        pad: ``{path: value}``, or a Hugging Face tokenizer: its ``pad_token_id`` and
            ``padding_side`` for ``input_ids``, 0 for ``attention_mask``, -100 for ``labels``.

    Returns:
        The collate function.

    Raises:
        ArgumentError: The tokenizer has no padding token, or `pad` is neither.
    """
    if pad is None:
        return Collate()
    if isinstance(pad, Mapping):
        return Collate(pad=MappingProxyType(dict(pad)))
    if not hasattr(pad, "pad_token_id"):
        raise ArgumentError(
            f"pad={type(pad).__name__}",
            expected="a mapping of paths to padding values, or a tokenizer",
            got=repr(pad)[:80],
            remedy='Pass pad={"input_ids": 0, "labels": -100}.',
        )
    if pad.pad_token_id is None:
        raise ArgumentError(
            "pad=tokenizer",
            expected="a tokenizer with a padding token",
            got="pad_token_id None",
            remedy="Set one first: tokenizer.pad_token = tokenizer.eos_token.",
        )
    values = {
        "input_ids": pad.pad_token_id,
        "attention_mask": 0,
        "token_type_ids": getattr(pad, "pad_token_type_id", 0),
        "labels": -100,
    }
    return Collate(pad=MappingProxyType(values), side=pad.padding_side)


def padded_length(micro: Any, paths: Sequence[str]) -> int | None:
    """Return the padded length of a micro-batch: the longest second dimension of some leaves.

    Args:
        micro: A micro-batch.
        paths: The leaves that are padded.

    Returns:
        The length in tokens; None if there is no such leaf.
    """
    found = [
        leaf.shape[1]
        for path, leaf in leaves(micro)
        if path in paths and isinstance(leaf, Tensor) and leaf.ndim >= 2
    ]
    return max(found, default=None)


def to_device(micro: Any, device: torch.device) -> Any:
    """Return a micro-batch with its tensors on a device.

    To an accelerator the copy does not block: from pinned memory, on the current stream.

    Args:
        micro: A micro-batch.
        device: Where to.

    Returns:
        The micro-batch there; leaves that are no tensors as they were.
    """
    if all(not isinstance(leaf, Tensor) or leaf.device == device for leaf in flat(micro)):
        return micro

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if device.type == "cuda" and leaf.device.type == "cpu":
            return leaf.pin_memory().to(device, non_blocking=True)
        return leaf.to(device)

    return map_leaves(moved, micro)
