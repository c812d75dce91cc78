"""A hostile environment: warnings are errors (pyproject.toml), and no test may leave a trace."""

import os
import threading

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def nothing_leaks():
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    threads = set(threading.enumerate())
    yield
    ours = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    assert ours == environment
    assert torch.get_default_dtype() is dtype
    left = {t.name for t in set(threading.enumerate()) - threads if t.is_alive()}
    assert left <= {"tqdm_monitor"}, "datasets starts this one and keeps it"
    assert not (dist.is_available() and dist.is_initialized())
    assert torch.is_grad_enabled()
