import numpy as np

from gradaccum.rng import data_order


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
