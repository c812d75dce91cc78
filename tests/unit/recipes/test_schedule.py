"""The course of the learning rate."""

import pytest
from torch import nn
from torch.optim import SGD

from gradaccum.recipes.schedule import scheduler
from gradaccum.recipes.settings import Settings


@pytest.mark.parametrize(("told", "peak_at"), [({}, 5), ({"warmup": 8}, 8), ({"warmup": 0}, 0)])
def test_warm_up_is_as_long_as_was_told_and_by_default_half_of_a_short_run(told, peak_at):
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    course = scheduler(optimizer, Settings(recipe="gpt", scheduler="constant", **told), steps=10)
    rates = []
    for _ in range(10):
        rates.append(course.get_last_lr()[0])
        optimizer.step()
        course.step()
    assert rates[:peak_at] == [(k + 1) / (peak_at + 1) for k in range(peak_at)]
    assert rates[peak_at:] == [1.0] * (10 - peak_at)
