import random

import numpy as np
import pytest
import torch
from torch import nn

from gradaccum.snapshot import Snapshot, preserved


class Model(nn.Module):
    """Has a running mean, a buffer that its forward replaces, one that is None, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.register_buffer("expanded", torch.zeros(1, 4).expand(3, 4))

    def forward(self, x):
        self.calls = self.calls + 1
        self.nothing = self.calls if self.nothing is None else self.nothing + self.calls
        return self.dropout(self.norm(x))


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def run(model):
    return model(torch.arange(12.0).reshape(4, 3)), draws()


@pytest.mark.parametrize("raising", [False, True])
def test_everything_is_put_back(raising):
    model = Model()
    names = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    try:
        with preserved(model):
            first, drawn = run(model)
            model.eval()
            model.norm.train()
            if raising:
                raise KeyError
    except KeyError:
        pass
    assert model.training
    assert model.norm.training
    assert model.dropout.training
    for name, buffer in model.named_buffers():
        assert id(buffer) == names[name][0], name
        assert torch.equal(buffer, names[name][1]), name
    assert model.nothing is None
    again, drawn_again = run(model)
    assert torch.equal(first, again)
    assert drawn == drawn_again


def test_a_snapshot_can_be_put_back_more_than_once():
    model = Model()
    snapshot = Snapshot(model)
    found = []
    for _ in range(3):
        out, drawn = run(model)
        found.append((out.tolist(), drawn, model.norm.running_mean.tolist(), float(model.calls)))
        snapshot.restore()
    assert found[0] == found[1] == found[2]
    assert found[0][3] == 1
