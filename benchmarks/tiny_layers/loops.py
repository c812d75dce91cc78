"""The loops that are compared: by hand and with gradaccum, in pairs that read the same data."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import gradaccum as ga

SIZE, MICRO, STEPS, MAX_GRAD_NORM = 64, 8, 8, 1.0
Samples = tuple[Tensor, Tensor]
"""Inputs and labels of all samples, collated."""
MicroBatch = Any


def loss(model: nn.Module, micro: MicroBatch) -> ga.Loss:
    """Return the summed loss and the number of samples."""
    inputs, labels = micro
    return ga.Loss(cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


def _by_hand(
    model: nn.Module, optimizer: Optimizer, micro_batches: Iterable[MicroBatch]
) -> Iterator[None]:
    """Train as people do without a library, on any iterable of micro-batches."""
    for number, (inputs, labels) in enumerate(micro_batches, start=1):
        total = cross_entropy(model(inputs), labels, reduction="sum")
        (total / SIZE).backward()
        if number % STEPS == 0:
            clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def _over(
    model: nn.Module, optimizer: Optimizer, micro_batches: Iterable[MicroBatch]
) -> Iterator[None]:
    """Train with gradaccum around one's own loop."""
    accumulator = ga.accumulator(model, optimizer, max_grad_norm=MAX_GRAD_NORM)
    for inputs, labels in accumulator.over(micro_batches, steps=STEPS):
        total = cross_entropy(model(inputs), labels, reduction="sum")
        if accumulator.backward(total, weight=len(labels)):
            yield


def _step(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> Iterator[None]:
    """Train with gradaccum's step."""
    accumulator = ga.accumulator(
        model, optimizer, loss, micro_batch_size=MICRO, max_grad_norm=MAX_GRAD_NORM
    )
    for batch in batches:
        accumulator.step(batch)
        yield


def samples_by_hand(model: nn.Module, optimizer: Optimizer, samples: Samples) -> Iterator[None]:
    """Read samples one by one, and collate micro-batches: a DataLoader."""
    return _by_hand(model, optimizer, DataLoader(TensorDataset(*samples), batch_size=MICRO))


def samples_gradaccum(model: nn.Module, optimizer: Optimizer, samples: Samples) -> Iterator[None]:
    """Read samples one by one, and collate micro-batches."""
    dataset = TensorDataset(*samples)
    return _step(model, optimizer, ga.effective_batches(dataset, SIZE, shuffle=False))


def rows_by_hand(model: nn.Module, optimizer: Optimizer, samples: Samples) -> Iterator[None]:
    """Cut collated effective batches into micro-batches."""
    batches = zip(*(tensor.split(SIZE) for tensor in samples), strict=True)
    cut = (zip(*(leaf.split(MICRO) for leaf in batch), strict=True) for batch in batches)
    return _by_hand(model, optimizer, (micro for batch in cut for micro in batch))


def rows_gradaccum(model: nn.Module, optimizer: Optimizer, samples: Samples) -> Iterator[None]:
    """Hand over collated effective batches."""
    return _step(model, optimizer, zip(*(tensor.split(SIZE) for tensor in samples), strict=True))


def micro_batches_by_hand(
    model: nn.Module, optimizer: Optimizer, samples: Samples
) -> Iterator[None]:
    """Take micro-batches that were collated beforehand."""
    return _by_hand(model, optimizer, _collated(samples))


def micro_batches_gradaccum(
    model: nn.Module, optimizer: Optimizer, samples: Samples
) -> Iterator[None]:
    """Take micro-batches that were collated beforehand."""
    return _over(model, optimizer, _collated(samples))


def loader_by_hand(model: nn.Module, optimizer: Optimizer, samples: Samples) -> Iterator[None]:
    """Take micro-batches from a DataLoader."""
    return _by_hand(model, optimizer, DataLoader(TensorDataset(*samples), batch_size=MICRO))


def loader_gradaccum(model: nn.Module, optimizer: Optimizer, samples: Samples) -> Iterator[None]:
    """Take micro-batches from a DataLoader."""
    return _over(model, optimizer, DataLoader(TensorDataset(*samples), batch_size=MICRO))


itself_by_hand = itself_gradaccum = micro_batches_by_hand  # what the noise is


def _collated(samples: Samples) -> list[MicroBatch]:
    return list(zip(*(tensor.split(MICRO) for tensor in samples), strict=True))
