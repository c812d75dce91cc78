import random

import numpy as np
import pytest
import torch

from gradaccum.rng import data_order, preserved


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("raising", [False, True])
def test_generators_are_put_back(raising):
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    try:
        with preserved(torch.device("cpu")):
            assert draw() == expected
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            draw()
            if raising:
                raise KeyError
    except KeyError:
        pass
    assert draw() == expected


def test_data_order_is_a_function_of_seed_and_epoch():
    orders = {
        (seed, epoch): data_order(50, seed=seed, epoch=epoch).tolist()
        for seed in range(3)
        for epoch in range(3)
    }
    assert len({tuple(order) for order in orders.values()}) == 9
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    np.random.seed(8)
    assert data_order(50, seed=1, epoch=2).tolist() == orders[1, 2]
