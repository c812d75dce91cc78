"""Models whose samples interact, cut in any way: against one plain pass over the full batch."""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradaccum as ga
from gradaccum import coupled
from gradaccum.feed import Feed
from gradaccum.sizing import Told
from gradaccum.update import Update

STEPS = 5
CUTS = [(11,), (5, 6), (1, 4, 3, 3), (2, 1, 1, 3, 1, 1, 1, 1)]


class Block(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width, momentum=0.3),
        )
        self.skip = nn.Sequential(nn.Conv2d(width, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


class Resnet(nn.Module):
    """Ends at 1 x 1, where a micro-batch of one sample has one value per channel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6, momentum=None))
        self.blocks = nn.Sequential(Block(6, 2), Block(6, 2), Block(6, 2))
        self.head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4))

    def forward(self, x):
        return self.head(self.blocks(self.stem(x + 2)))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 5, 3, 2, 1), nn.SyncBatchNorm(5), nn.GELU())
        self.deep = nn.Sequential(nn.Conv2d(5, 5, 3, 1, 1), nn.BatchNorm2d(5), nn.GELU())
        self.up = nn.ConvTranspose2d(10, 4, 4, 2, 1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x):
        high = self.down(x)
        return self.norm(self.up(torch.cat([high, self.deep(high)], 1))).mean((2, 3))


class Mlp(nn.Module):
    """One layer twice in a pass, one in evaluation mode, one frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(3 * 16 * 16, 8), nn.BatchNorm1d(8)
        self.still, self.frozen = nn.BatchNorm1d(8).eval(), nn.BatchNorm1d(8)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.twice(self.first(x.flatten(1)))
        return self.last(self.frozen(self.still(self.twice(hidden.tanh()))))


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(3, 4, 2, 2), nn.BatchNorm3d(4), nn.ReLU())

    def forward(self, x):
        return self.net(x.unflatten(2, (4, 4))).mean((2, 3, 4))


def class_loss(model, micro):
    return ga.losses.cross_entropy(model(micro["x"]), micro["y"])


def contrastive(model, micro):
    """InfoNCE of two views, in both directions, with every other sample as a negative."""
    a, b = (F.normalize(model(view), dim=1) for view in (micro["x"], micro["x"].flip(3)))
    here = coupled.offset(a) + torch.arange(len(a))
    sums = [
        F.cross_entropy(mine @ coupled.all_gather(others).T / 0.3, here, reduction="sum")
        for mine, others in ((a, b), (b, a))
    ]
    return ga.Loss(sum(sums), len(a))


def supervised(model, micro):
    """Supervised contrastive loss: samples of one class are each other's positives."""
    z = F.normalize(model(micro["x"]), dim=1)
    whole, labels = coupled.all_gather(z), coupled.all_gather(micro["y"])
    here = coupled.offset(z) + torch.arange(len(z))
    self_ = F.one_hot(here, len(whole)).bool()
    logits = (z @ whole.T / 0.3).masked_fill(self_, -1e9)
    same = (micro["y"][:, None] == labels) & ~self_
    logs = logits.log_softmax(1).masked_fill(~same, 0)
    return ga.Loss(-(logs.sum(1) / same.sum(1).clamp(min=1)).sum(), len(z))


def balanced(model, micro):
    """A load balance over experts: shares of the whole batch, multiplied."""
    routed = model(micro["x"]).softmax(1)
    n = coupled.all_reduce(torch.tensor(float(len(routed)), dtype=torch.float64))
    chosen = coupled.all_reduce(F.one_hot(routed.argmax(1), 4).double().sum(0)) / n
    share = coupled.all_reduce(routed.sum(0)) / n
    whole = (chosen * share).sum() * 4
    return ga.Loss(
        F.cross_entropy(routed, micro["y"], reduction="sum") + len(routed) * whole, len(routed)
    )


def samples(seed):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(11, 3, 16, 16, generator=draws, dtype=torch.float64)
    return {"x": x, "y": torch.randint(4, (11,), generator=draws)}


def trained(model, loss, cut):
    """Make five steps; `cut` None is one plain pass over the full batch, by torch alone."""
    model = deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    told, held = [], []
    if cut is not None:
        coupled.exact_batchnorm(model)
        accumulator = ga.Accumulator(
            model=model,
            update=Update(optimizers=(optimizer,), max_grad_norm=0.7),
            loss=loss,
            feed=Feed(),
            sizing=Told(Fixed(cut)),
            runner=coupled.Lockstep(),
        )
    for step in range(STEPS):
        micro = samples(step)
        if cut is not None:
            report = accumulator.step(micro)
            assert report.micro_batches == len(cut)
            assert report.samples == 11
            told.append((report.loss, report.grad_norm))
        else:
            optimizer.zero_grad()
            found = loss(model, micro)
            (found.sum / found.weight).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            told.append(((found.sum / found.weight).item(), norm.item()))
        held.append({k: v.clone() for k, v in model.state_dict().items()})
    return told, held


class Fixed:
    """A cut of uneven sizes."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __call__(self, num_samples, lengths, indices=None):
        places = torch.arange(num_samples).numpy()
        bounds = [sum(self.sizes[:k]) for k in range(len(self.sizes) + 1)]
        return ga.partition.Partition(micro_batches=tuple(places[a:b] for a, b in pairwise(bounds)))

    def relaxed(self):
        return self


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Resnet, class_loss),
        (Unet, class_loss),
        (Mlp, class_loss),
        (Volume, class_loss),
        (Resnet, contrastive),
        (Mlp, supervised),
        (Unet, balanced),
    ],
    ids=lambda one: one.__name__,
)
def test_the_update_is_that_of_the_full_batch(kind, loss, cut):
    torch.manual_seed(0)
    model = kind().double()
    expected, states = trained(model, loss, None)
    found, held = trained(model, loss, cut)
    assert found == [pytest.approx(pair, rel=1e-11) for pair in expected]
    for after, before in zip(held, states, strict=True):
        assert after.keys() == before.keys()
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["autocast", "bfloat16", "channels last"])
def test_in_other_precisions_and_layouts(kind):
    """As near to float64 as torch's own BatchNorm over the full batch is."""
    torch.manual_seed(0)
    model = Resnet().double()
    micro = {k: v.float() if k == "x" else v for k, v in samples(0).items()}
    if kind == "channels last":
        micro["x"] = micro["x"].contiguous(memory_format=torch.channels_last)
    if kind == "bfloat16":
        micro["x"] = micro["x"].to(torch.bfloat16)

    def cast_loss(model, micro):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return ga.Loss(class_loss(model, micro).sum.float(), len(micro["y"]))

    def gradient(cut, dtype, loss, batch):
        one = deepcopy(model).to(dtype)
        before = nn.utils.parameters_to_vector(one.parameters()).detach().clone()
        if cut is not None:
            coupled.exact_batchnorm(one)
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        ga.accumulator(one, optimizer, loss, micro_batch_size=cut or 11, verify="never").step(batch)
        return (before - nn.utils.parameters_to_vector(one.parameters()).detach()).double()

    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    wide = {k: v.double() if k == "x" else v for k, v in micro.items()}
    truth = gradient(None, torch.float64, class_loss, wide)
    full, found = (gradient(cut, dtype, cast_loss, micro) for cut in (None, 3))
    off = [((one - truth).norm() / truth.norm()).item() for one in (full, found)]
    assert off[1] < 2 * off[0] + 1e-6
