"""Models whose samples interact, which plain accumulation trains otherwise."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradaccum as ga
from gradaccum import coupled

ROWS = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 1


def info_nce(model, micro):
    z = model(micro)
    whole = coupled.all_gather(z)
    here = coupled.offset(z) + torch.arange(len(z))
    return ga.Loss(F.cross_entropy(z @ whole.T, here, reduction="sum"), len(z))


@pytest.mark.parametrize("lockstep", [False, True])
def test_negatives(lockstep):
    """sentence-transformers#1822, #2428: with one sample a micro-batch there are no negatives."""
    model = nn.Linear(5, 2, bias=False).double()
    nn.init.zeros_(model.weight)  # uniform over 4 samples
    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        info_nce,
        micro_batch_size=1,
        lockstep=lockstep,
        verify="never",
    )
    report = accumulator.step(ROWS[:4])
    assert report.loss == pytest.approx(1.3862943611198906 if lockstep else 0.0, rel=1e-12)


@pytest.mark.parametrize("exact", [False, True])
def test_running_statistics(exact):
    """pytorch#46516: running statistics move once an effective batch, as for the full batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    if exact:
        coupled.exact_batchnorm(model)
    accumulator = ga.accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, micro: ga.Loss(model(micro).square().sum(), len(micro)),
        micro_batch_size=2,
        verify="never",
    )
    assert accumulator.step(ROWS).micro_batches == 8
    once = {"running_mean": 0.1 * ROWS.mean(0), "running_var": 0.9 + 0.1 * ROWS.var(0)}
    for name, value in once.items():
        near = torch.allclose(getattr(model[0], name), value, rtol=1e-12)
        assert near is exact
    assert model[0].num_batches_tracked == (1 if exact else 8)
