"""A hostile environment: warnings are errors (pyproject.toml), and no test may leave a trace."""

import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)  # models here are tiny: a second thread only waits for the first

OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # set by pytest, and by torch itself


def environment():
    return {name: value for name, value in os.environ.items() if name not in OTHERS}


@pytest.fixture(autouse=True)
def nothing_leaks():
    before, dtype = environment(), torch.get_default_dtype()
    threads = set(threading.enumerate())
    yield
    assert environment() == before
    assert torch.get_default_dtype() is dtype
    if set(threading.enumerate()) > threads:
        gc.collect()  # those of micro-batches in lockstep end with what holds them
    for thread in set(threading.enumerate()) - threads - {threading.current_thread()}:
        thread.join(timeout=2 if thread.name != "tqdm_monitor" else 0)  # told to end, still ending
    left = {t.name for t in set(threading.enumerate()) - threads if t.is_alive()}
    assert left <= {"tqdm_monitor"}, "datasets starts this one and keeps it"
    assert not (dist.is_available() and dist.is_initialized())
    assert torch.is_grad_enabled()


@pytest.fixture(scope="module")
def little_to_collect():
    """A failure collects garbage, which takes long in a process that has imported so much."""
    import torch._dynamo  # by itself it would come with the first optimizer step, after this

    assert torch._dynamo
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
