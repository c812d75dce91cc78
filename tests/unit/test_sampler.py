from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import gradaccum as ga
from gradaccum.errors import ArgumentError

LENGTHS = np.random.default_rng(1).integers(1, 40, 50)


def steps(sampler):
    """Return the samples of each optimizer step of an epoch."""
    micro = list(sampler)
    per = sampler.accumulation_steps
    return [sorted(chain(*micro[k : k + per])) for k in range(0, len(micro), per)]


@pytest.mark.parametrize("last", ["keep", "drop"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_sorting_changes_no_optimizer_step(epoch, last):
    """The same samples share a step as in the effective batches of the same seed."""
    options = {"size": 12, "seed": 5, "last": last}
    sampler = ga.EffectiveBatchSampler(LENGTHS, micro_batch_size=4, **options)
    sampler.set_epoch(epoch)
    batches = ga.effective_batches(range(50), **options, epochs=epoch + 1)
    expected = [sorted(batch.sample(k) for k in range(len(batch))) for batch in batches]
    assert steps(sampler) == expected[-len(steps(sampler)) :]
    assert len(steps(sampler)) == (5 if last == "keep" else 4)


def test_micro_batches_are_of_like_length():
    sampler = ga.EffectiveBatchSampler(LENGTHS, size=12, micro_batch_size=4)
    for k, indices in enumerate(sampler):
        if k % 3 == 0:
            longest = np.inf
        assert LENGTHS[indices].max() <= longest
        longest = LENGTHS[indices].min()


@pytest.mark.parametrize("last", ["keep", "drop"])
def test_the_length_is_what_comes(last):
    for count in range(1, 30):
        options = {"size": 6, "micro_batch_size": 2, "last": last}
        sampler = ga.EffectiveBatchSampler(LENGTHS[:count], **options)
        assert len(sampler) == len(list(sampler)) > 0


def test_in_the_order_of_the_dataset():
    sampler = ga.EffectiveBatchSampler([1, 2, 3, 4], size=2, micro_batch_size=1, shuffle=False)
    assert list(sampler) == [[1], [0], [3], [2]]


class Data(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.full((int(LENGTHS[index]),), index)


def test_in_a_data_loader():
    sampler = ga.EffectiveBatchSampler(LENGTHS, size=12, micro_batch_size=4)
    loader = DataLoader(Data(), batch_sampler=sampler, collate_fn=list)
    assert len(loader) == len(sampler)
    found = [[int(row[0]) for row in micro] for micro in loader]
    again = [[int(row[0]) for row in micro] for micro in loader]
    assert again != found  # an order of its own for each epoch, also where nobody sets it
    sampler.set_epoch(0)
    assert found == list(sampler)
    assert again == list(sampler)
    assert (sampler.batch_size, sampler.drop_last) == (4, False)  # what Accelerate reads


def test_last_is_keep_or_drop():
    with pytest.raises(ArgumentError, match="keep"):
        ga.EffectiveBatchSampler(LENGTHS, size=12, micro_batch_size=4, last="dropp")


def test_micro_batches_must_fill_an_effective_batch():
    with pytest.raises(ArgumentError, match="micro_batch_size=5"):
        ga.EffectiveBatchSampler(LENGTHS, size=12, micro_batch_size=5)
