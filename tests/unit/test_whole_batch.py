"""When the size of micro-batches is looked for."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from helpers.training import Slope

import gradaccum as ga
from gradaccum.errors import PhaseError
from gradaccum.feed import Feed
from gradaccum.partition import FixedCut
from gradaccum.update import Update


@dataclass
class Asked:
    """Notes the longest sample whenever it is asked."""

    longest: list = field(default_factory=list)
    measures: ClassVar[bool] = True

    def __call__(self, num_samples, lengths, trial):
        with trial.opened():
            self.longest.append(None if lengths is None else int(lengths.max()))
        return FixedCut(size=1)


@dataclass
class AskedOnce(Asked):
    """What the user told does not depend on samples."""

    measures: ClassVar[bool] = False


def batch(*lengths):
    return [{"input_ids": torch.ones(length, dtype=torch.float64)} for length in lengths]


def loss(model, micro):
    rows = micro["input_ids"].reshape(-1, 1)
    return ga.Loss(model(rows).sum(), len(rows))


def accumulator_of(sizing):
    model = Slope()
    update = Update(optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),))
    return ga.Accumulator(model=model, update=update, loss=loss, feed=Feed(), sizing=sizing)


def test_far_longer_samples_are_measured_anew():
    sizing = Asked()
    accumulator = accumulator_of(sizing)
    accumulator.evaluate(batch(3, 4))
    for lengths in ((2, 3), (8, 1), (4, 9), (9, 18), (19, 3), (5,)):
        accumulator.step(batch(*lengths))
    assert sizing.longest == [4, 9, 19]
    sizing = AskedOnce()
    accumulator = accumulator_of(sizing)
    for lengths in ((2, 3), (80, 1)):
        accumulator.step(batch(*lengths))
    assert sizing.longest == [3]


def test_a_loop_of_ones_own_is_not_disturbed():
    sizing = Asked()
    accumulator = accumulator_of(sizing)
    for _ in accumulator.over(batch(3, 3), steps=2):
        with pytest.raises(PhaseError, match="before a loop of your own"):
            accumulator.evaluate(batch(3))
        break
    accumulator.evaluate(batch(3))
    for _ in accumulator.over(batch(3, 3), steps=2):
        accumulator.evaluate(batch(30))  # as it was cut before
        break
    assert sizing.longest == [3]
