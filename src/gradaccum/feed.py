"""How an effective batch gets to the device: cut, collated and moved, one micro-batch ahead."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gradaccum.batch import EffectiveBatch, LengthFunction, default_length
from gradaccum.collate import Collate, CollateFunction, padded_length, to_device
from gradaccum.errors import ArgumentError
from gradaccum.partition import Partition


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """The way of samples into micro-batches.

    Args:
        collate: From samples to a micro-batch on the host.
        length: Length of a sample in tokens.
        padded: Leaves whose length after collating must be the one that was cut by; none to
            leave it unchecked.
        device: Where micro-batches are moved to.
    """

    collate: CollateFunction = field(default_factory=Collate)
    length: LengthFunction = default_length
    padded: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def micro_batches(self, effective: EffectiveBatch, plan: Partition) -> Iterator[Any]:
        """Iterate over the micro-batches of an effective batch.

        Args:
            effective: The effective batch.
            plan: Its partition.

        Yields:
            Each micro-batch, on the device. None is held here while the consumer works.
        """
        for k, positions in enumerate(plan):
            micro = effective.micro_batch(positions, self.collate)
            self._compare(micro, plan, k)
            micro = to_device(micro, self.device)
            yield micro
            del micro

    def peek(self, effective: EffectiveBatch, positions: list[int]) -> Any:
        """Return some samples as one micro-batch on the device.

        Args:
            effective: The effective batch.
            positions: Positions of the samples in it.

        Returns:
            The micro-batch.
        """
        return to_device(effective.peek(np.asarray(positions), self.collate), self.device)

    def _compare(self, micro: Any, plan: Partition, k: int) -> None:
        if not self.padded or plan.lengths is None:
            return
        found, told = padded_length(micro, self.padded), plan.padded_length(k)
        if found is not None and found != told:
            positions = plan.micro_batches[k]
            longest = int(positions[np.argmax(plan.lengths[positions])])
            raise ArgumentError(
                f"length of sample {longest} of the effective batch",
                expected=f"{told} tokens, as the length function says",
                got=f"{found} tokens after collating",
                remedy="Make lengths count what the collate function makes, padding to a "
                "multiple included.",
            )
