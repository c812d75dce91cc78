"""The pair: losses are sums, cuts change nothing, and neither half touches the other's sums."""

from copy import deepcopy

import pytest
import torch
from torch.nn import functional

import gradaccum as ga
from gradaccum.collate import collate_function
from gradaccum.coupled import exact_batchnorm
from gradaccum.recipes import gan
from gradaccum.recipes.gan import discriminator_loss, generator_loss
from gradaccum.recipes.images.dcgan import Pair
from gradaccum.recipes.settings import Settings

SETTINGS = Settings(recipe="gan", weight_decay=0.0)
LOSSES = {"discriminator": discriminator_loss, "generator": generator_loss}
SAMPLES = 14


@pytest.fixture
def pair() -> Pair:
    """In float64, and in evaluation mode, where BatchNorm has its running statistics."""
    torch.manual_seed(0)
    made = Pair(size=32, width=8, noise=6).double()
    for _ in range(3):  # running statistics that are not those of new ones
        made.discriminator(made.generator(torch.randn(16, 6).double()))
    return made.eval()


def samples(count=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, 32, 32, generator=generator, dtype=torch.float64) * 2 - 1
    noise = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return [{"image": image, "noise": z} for image, z in zip(images, noise, strict=True)]


def adam(model, lr=2e-3):
    return gan.adam(model, SETTINGS, lr=lr)


def half(pair, name):
    return getattr(pair, name)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def mean_loss(pair, name, micro):
    """Return the loss as DCGAN writes it: a mean, with labels."""
    images = pair.generator(micro["noise"])
    ones, zeros = (torch.full((len(images),), value).double() for value in (1, 0))
    bce = functional.binary_cross_entropy_with_logits
    if name == "generator":
        return bce(pair.discriminator(images), ones)
    real, fake = pair.discriminator(micro["image"]), pair.discriminator(images.detach())
    return bce(real, ones) + bce(fake, zeros)


def full_batch_step(pair, optimizers, name, micro):
    """Make the update of the full batch, with nothing of this library."""
    parameters = list(half(pair, name).parameters())
    gradients = torch.autograd.grad(mean_loss(pair, name, micro), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizers[name].step()
    optimizers[name].zero_grad()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_a_sum_and_its_weight_the_samples(pair, name):
    micro = collate_function()(samples())
    loss = LOSSES[name](pair, micro)
    assert loss.weight == SAMPLES
    assert loss.mean().item() == pytest.approx(mean_loss(pair, name, micro).item(), rel=1e-12)
    parts = [LOSSES[name](pair, collate_function()(one)) for one in (samples()[:3], samples()[3:])]
    assert sum(one.sum.item() for one in parts) == pytest.approx(loss.sum.item(), rel=1e-12)
    assert [one.weight for one in parts] == [3, SAMPLES - 3]


def test_fakes_of_the_discriminator_carry_no_graph(pair):
    loss = discriminator_loss(pair, collate_function()(samples()))
    gradients = torch.autograd.grad(loss.sum, list(pair.generator.parameters()), allow_unused=True)
    assert all(gradient is None for gradient in gradients)


@pytest.mark.parametrize("training", [False, True], ids=["at rest", "exact BatchNorm"])
@pytest.mark.parametrize(("size", "micro_batches"), [(14, 1), (5, 3), (2, 7)])
def test_however_it_is_cut_the_update_is_that_of_the_full_batch(
    pair, size, micro_batches, training
):
    twin = deepcopy(pair.train(training))
    if training:
        exact_batchnorm(pair)
    optimizers = {name: adam(half(twin, name)) for name in LOSSES}
    accumulators = {
        name: ga.accumulator(
            pair, adam(half(pair, name)), loss, micro_batch_size=size, verify="never"
        )
        for name, loss in LOSSES.items()
    }
    for _ in range(3):
        for name in LOSSES:
            report = accumulators[name].step(samples())
            assert report.micro_batches == micro_batches
            full_batch_step(twin, optimizers, name, collate_function()(samples()))
            assert torch.allclose(flat(pair), flat(twin), rtol=1e-10, atol=1e-12)
    for (path, found), expected in zip(pair.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=path)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_moves_its_own_half_alone(pair, name):
    (other,) = set(LOSSES) - {name}
    averaged = ga.EMA(pair.generator, 0.5)
    accumulator = ga.accumulator(
        pair,
        adam(half(pair, name)),
        LOSSES[name],
        micro_batch_size=5,
        verify="never",
        ema=averaged if name == "generator" else None,
    )
    before = {each: flat(half(pair, each)) for each in LOSSES}
    accumulator.step(samples())
    assert not torch.equal(before[name], flat(half(pair, name)))
    assert torch.equal(before[other], flat(half(pair, other)))
    assert all(p.grad is None for p in pair.parameters())
    moved = not torch.equal(before["generator"], flat(averaged.module))
    assert moved == (name == "generator")


@pytest.mark.parametrize("name", LOSSES)
def test_sums_are_untouched_by_a_step_of_the_other_half(pair, name):
    """In the middle of an effective batch of one half, the other makes a whole step."""
    (other,) = set(LOSSES) - {name}
    alone = deepcopy(pair)
    results = []
    for model, interrupted in ((alone, False), (pair, True)):
        mine = ga.accumulator(model, adam(half(model, name)))
        # So small a learning rate moves nothing: the two runs see the same other half.
        step = ga.accumulator(
            model,
            adam(half(model, other), lr=1e-300),
            LOSSES[other],
            micro_batch_size=7,
            verify="never",
        ).step
        for k, micro in enumerate(mine.over([samples()[:9], samples()[9:]], steps=2)):
            report = mine.backward(LOSSES[name](model, collate_function()(micro)))
            if interrupted and k == 0:
                held = [p.grad.clone() for p in half(model, name).parameters()]
                assert step(samples()).grad_norm > 0
                now = [p.grad for p in half(model, name).parameters()]
                assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))
        results.append((flat(half(model, name)), report.grad_norm, report.loss))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
