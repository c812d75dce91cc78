"""The baton: one at a time, always in the same order, and nothing left behind whatever happens."""

import _thread
import pickle
import signal
import threading
import time
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradaccum as ga
from gradaccum import coupled
from gradaccum.errors import ArgumentError, CoupledError


@contextmanager
def within(seconds):
    """Raise in the main thread if this takes longer, as it would if threads hung."""

    def late(*_):
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def nothing_hangs():
    with within(20):
        yield


def run(forward, parts):
    returned = []
    coupled.Lockstep().run(parts, forward, lambda *found: returned.extend(found))
    return returned


def test_one_at_a_time_in_the_same_order():
    turns, running = [], []

    def forward(k):
        for at in range(3):
            running.append(k)
            time.sleep(0.002)
            assert running == [k]
            running.clear()
            turns.append((at, k))
            coupled.all_reduce(torch.ones(()))
        return k

    assert run(forward, [0, 1, 2]) == [0, 1, 2]
    assert turns == [(at, k) for at in range(3) for k in range(3)]


def test_what_is_taken_away():
    def forward(rows):
        x = torch.tensor(rows)
        whole = coupled.all_gather(x)
        first = coupled.offset(x)
        total = coupled.all_reduce(x.sum(0))
        total += 1  # its own
        return whole.tolist(), first, total.tolist()

    parts = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], []]
    parts[2] = [[7.0, 8.0]]
    whole = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    assert run(forward, parts) == [(whole, k, [17.0, 21.0]) for k in (0, 1, 3)]


def test_outside_of_lockstep_all_is_the_identity():
    x = torch.ones(3, 2)
    assert coupled.all_reduce(x) is x
    assert coupled.all_gather(x) is x
    assert coupled.offset(x) == 0


def test_none_meets_none():
    assert run(len, []) == []


def other_way(k):
    if k == 1:
        coupled.all_reduce(torch.ones(()))
    coupled.all_gather(torch.ones(2, 3))


def one_more(k):
    for _ in range(2 + (k == 2)):
        coupled.all_reduce(torch.ones(2))


def other_shape(k):
    coupled.all_reduce(torch.ones(2 + k))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            other_way,
            r"meeting 1 .* micro-batch 0 at all_gather .*micro-batch 1 at all_reduce of \(\)",
        ),
        (one_more, "meeting 3 .* micro-batch 0 at its end, and micro-batch 2 at all_reduce"),
        (other_shape, r"all_reduce of \(2,\), and micro-batch 1 at all_reduce of \(3,\)"),
    ],
)
def test_another_way_is_told(forward, message):
    with pytest.raises(CoupledError, match=message):
        run(forward, range(4))


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_what_one_raises_goes_on_and_the_others_end(kind, at, who):
    unwound = []

    def forward(k):
        try:
            for turn in range(3):
                if (turn, k) == (at, who):
                    raise kind("mine")
                coupled.all_reduce(torch.ones(2))
        finally:
            unwound.append(k)

    with pytest.raises(kind, match="mine") as caught:
        run(forward, range(3))
    assert caught.value.__notes__ == [f"raised in micro-batch {who} of 3, in lockstep"]
    begun = range(3) if at else range(who + 1)
    assert sorted(unwound) == list(begun)


def test_what_a_user_catches_is_not_the_end_of_the_others():
    """A forward pass that swallows all exceptions still ends."""

    def forward(k):
        try:
            coupled.all_reduce(torch.ones(2))
        except Exception:
            pytest.fail("caught what unwinds it")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(forward, range(3))


def test_ctrl_c_in_the_middle():
    def forward(k):
        coupled.all_reduce(torch.ones(2))
        if k == 1:
            _thread.interrupt_main()
            time.sleep(0.05)
        coupled.all_reduce(torch.ones(2))

    with pytest.raises(KeyboardInterrupt):
        run(forward, range(3))


def test_each_thread_has_what_torch_keeps_for_the_caller():
    class Counted(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    packed = []

    def forward(k):
        assert torch.is_grad_enabled()
        made = torch.empty(1)
        (torch.ones(2, requires_grad=True) * 2).square()
        product = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
        return made.device.type, product.dtype, made.dtype

    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(threading.current_thread().name) or t, lambda t: t
    )
    with (
        Counted() as counted,
        hooks,
        torch.device("meta"),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        found = run(forward, range(2))
    assert found == [("meta", torch.bfloat16, torch.float32)] * 2
    assert {name.partition("_")[0] for name in packed} == {"micro-batch"}
    assert counted.calls > 4
    with torch.no_grad():
        assert run(lambda k: torch.is_grad_enabled(), [0]) == [False]


def test_threads_stay_for_the_next_time_and_end_with_the_runner():
    runner, names = coupled.Lockstep(), []

    def forward(k):
        names.append(threading.get_ident())
        coupled.all_reduce(torch.ones(2))

    for _ in range(3):
        runner.run(range(4), forward, lambda *_: None)
    assert len(set(names)) == 4
    lasting = [t for t in threading.enumerate() if t.ident in names]
    assert len(lasting) == 4
    del runner
    for thread in lasting:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in lasting)


def test_where_gradients_are_off_they_are_off_together():
    def forward(k):
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            off = coupled.all_reduce(x)
        return off.requires_grad, coupled.all_reduce(x).requires_grad

    assert run(forward, range(2)) == [(False, True)] * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1)
        )

    def forward(self, x):
        return self.net(x)


def loss(model, micro):
    return ga.Loss(model(micro).square().sum(), len(micro))


def built(**options):
    torch.manual_seed(0)
    model = Net().double()
    coupled.exact_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"micro_batch_size": 2, **options}
    return model, ga.accumulator(model, optimizer, options.pop("loss", loss), **options)


def test_a_failed_step_leaves_all_as_it_was():
    calls = []

    def failing(model, micro):
        calls.append(number := len(calls))
        found = loss(model, micro)  # where all meet, and running statistics move
        if number == 2:
            raise ValueError("mine")
        return found

    model, accumulator = built(loss=failing)
    before, drawn = deepcopy(model.state_dict()), torch.get_rng_state()
    rows = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="mine"):
        accumulator.step(rows)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in model.parameters())
    assert accumulator.step(rows).outcome.stepped
    assert model.net[1].num_batches_tracked == 1


def test_out_of_memory_is_run_again_in_smaller_micro_batches():
    def hungry(model, micro):
        found = loss(model, micro)
        if len(micro) > 1:
            raise torch.OutOfMemoryError("full")
        return found

    model, accumulator = built(loss=hungry)
    model.net[2].p = 0.0
    expected, plainly = built(micro_batch_size=7)
    expected.net[2].p = 0.0
    rows = torch.randn(7, 3, dtype=torch.float64)
    report, plain = accumulator.step(rows), plainly.step(rows)
    assert (report.replays, report.micro_batches, plain.micro_batches) == (1, 7, 1)
    for a, b in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [7, 3, 1])
def test_evaluation_meets_as_well(size):
    def spread(model, micro):
        found = model(micro)
        n = coupled.all_reduce(torch.tensor(float(len(micro)), dtype=torch.float64))
        mean = coupled.all_reduce(found.sum(0)) / n
        return ga.Loss((found - mean).square().sum(), len(micro))

    model, accumulator = built(loss=spread, micro_batch_size=size)
    rows = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = model.eval()(rows).var(correction=0).item()
    model.train()
    found = accumulator.evaluate(rows)
    assert found.loss == pytest.approx(expected, rel=1e-12)
    assert (found.weight, found.samples) == (7, 7)


def test_random_layers_draw_the_same_for_the_same_partition():
    states = []
    for _ in range(2):
        model, accumulator = built()
        torch.manual_seed(3)
        accumulator.step(torch.ones(5, 3, dtype=torch.float64) * torch.arange(5)[:, None])
        states.append(model.state_dict())
    assert all(torch.equal(a, states[1][k]) for k, a in states[0].items())


def test_exact_batchnorm_is_plain_outside_and_comes_off_again():
    torch.manual_seed(0)
    model, rows = Net().double(), torch.randn(5, 3, dtype=torch.float64)
    model.net[2].p = 0.0
    plain, names = deepcopy(model), list(model.state_dict())
    exact = coupled.exact_batchnorm(model)
    assert list(exact.layers) == ["net.1"]
    assert coupled.is_exact(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model(rows), plain(rows))
    assert torch.equal(model.net[1].running_var, plain.net[1].running_var)
    copy = pickle.loads(pickle.dumps(model))
    assert coupled.is_exact(copy)
    assert copy.net[1].forward.args[0] is copy.net[1]
    exact.remove()
    assert not coupled.is_exact(model)
    assert torch.equal(model.eval()(rows), plain.eval()(rows))
    exact.remove()


def test_one_value_per_channel_is_refused():
    _, accumulator = built()
    with pytest.raises(ArgumentError, match="more than 1 value per channel"):
        accumulator.step(torch.ones(1, 3, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="Linear without any"):
        coupled.exact_batchnorm(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": None, "micro_batch_size": None}, "a loss function"),
        ({"micro_batch_size": None}, "micro_batch_size"),
        ({"micro_batch_size": None, "memory": "1GiB"}, "a budget of memory"),
        ({"nonfinite": "drop_micro_batch"}, "leave out"),
    ],
)
def test_what_lockstep_cannot_have(options, message):
    with pytest.raises(ArgumentError, match=message):
        built(**options)


def test_lockstep_may_be_left_out_by_hand():
    """As one may want to see what plain accumulation makes of it."""
    rows = torch.randn(8, 3, dtype=torch.float64)
    found = []
    for lockstep in (None, False):
        model, accumulator = built(lockstep=lockstep, verify="never")
        accumulator.step(rows)
        found.append(int(model.net[1].num_batches_tracked))
    assert found == [1, 4]
