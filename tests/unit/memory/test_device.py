"""How much memory there is, where a control group says less than the machine."""

import pytest
import torch

from gradaccum.errors import ArgumentError
from gradaccum.memory import Budget, require_within, total_bytes, usable_bytes
from gradaccum.memory import device as module

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 64 GiB, and a place for its control groups."""
    (tmp_path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(module, "_OWN", tmp_path / "cgroup")
    pages = {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    monkeypatch.setattr(module, "_available", lambda: 50 * GIB)
    return tmp_path


def group(folder, names, limit, used, cache):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def test_without_a_group_it_is_the_machine(machine):
    assert total_bytes(CPU) == 64 * GIB
    assert usable_bytes(CPU, held=7) == 7 + int(0.9 * 50 * GIB)
    group(machine, module._FILES[0], "max", 9 * GIB, 0)
    assert total_bytes(CPU) == 64 * GIB


@pytest.mark.parametrize("version", [2, 1])
def test_the_tightest_group_counts_and_the_page_cache_does_not(machine, version):
    names = module._FILES[2 - version]
    own = "0::/job/step" if version == 2 else "7:cpu:/\n4:memory:/job/step"
    (machine / "cgroup").write_text(f"{own}\n")
    root = machine if version == 2 else machine / "memory"
    group(root, names, 40 * GIB, 20 * GIB, 0)
    group(root / "job", names, 12 * GIB, 11 * GIB, 8 * GIB)
    group(root / "job" / "step", names, "max", 11 * GIB, 8 * GIB)
    assert total_bytes(CPU) == 12 * GIB
    assert usable_bytes(CPU, held=0) == int(0.9 * 9 * GIB)


def test_a_budget_beyond_the_group_is_refused(machine):
    group(machine, module._FILES[0], 2 * GIB, GIB, 0)
    require_within(Budget(bytes=2 * GIB), CPU, call="memory='2GiB'")
    with pytest.raises(ArgumentError, match=r"at most 2.00 GiB, which is what cpu has, got 3.00"):
        require_within(Budget(bytes=3 * GIB), CPU, call="memory='3GiB'")


def test_here_there_is_some():
    assert 0 < usable_bytes(CPU, held=0) < total_bytes(CPU)
