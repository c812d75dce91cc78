"""How much memory a device has, and how much of it this process may still take."""

import os
from pathlib import Path

import torch

from gradaccum.errors import ArgumentError
from gradaccum.memory.budget import Budget
from gradaccum.units import binary

_USABLE = 0.9  # of what is free: fragments, and what kernels take for themselves
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Limit, use, and the part of it that files have left in the page cache, in versions 2 and 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def total_bytes(device: torch.device) -> int:
    """Return the bytes that a device has.

    Args:
        device: A CUDA device, or the CPU: its memory, or what the container may use of it.

    Returns:
        Bytes.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for limit, _ in _container())])


def require_within(budget: Budget, device: torch.device, *, call: str) -> None:
    """Refuse a budget that a device has not.

    Args:
        budget: Bytes that a step may use.
        device: Where it runs.
        call: What the user wrote.

    Raises:
        ArgumentError: It is more than there is.
    """
    if budget.bytes > (there := total_bytes(device)):
        raise ArgumentError(
            call,
            expected=f"at most {binary(there)}, which is what {device} has",
            got=binary(budget.bytes),
            remedy="Give less; or leave memory out, to use what is free.",
        )


def usable_bytes(device: torch.device, *, held: int) -> int:
    """Return the budget of a step where the user names none.

    Args:
        device: Where it runs.
        held: Bytes that the step will use and that are there already, such as parameters.

    Returns:
        Nine tenths of what is free, and what is held.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        free = min([_available(), *(limit - used for limit, used in _container())])
    return held + int(_USABLE * max(free, 0))


def _available() -> int:
    """Return the bytes of main memory that can be had without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        told = {line.split(":")[0]: line.split()[1] for line in lines}
        return int(told["MemAvailable"]) * 1024
    except (OSError, KeyError):  # not Linux: half of what there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container() -> list[tuple[int, int]]:
    """Return limit and use of the control groups that this process is in, where they limit memory.

    What files have left in the page cache can be had at any time, and does not count as used.
    """
    found = []
    for folder in _groups():
        for limit, used, cache in _FILES:
            try:
                most = int((folder / limit).read_text())
                taken = int((folder / used).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):  # not there, or "max"
                continue
            told = dict(line.split() for line in lines)
            found.append((most, taken - int(told.get(cache, 0))))
    return found


def _groups() -> list[Path]:
    """Return the folders of this process's control groups, from its own up to the root."""
    try:
        lines = _OWN.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    found: list[Path] = []
    for line in lines:  # "0::/a/b" in version 2, "4:memory:/a/b" in version 1
        _, kinds, path = line.split(":", 2)
        if kinds in {"", "memory"}:
            root = _ROOT / kinds
            own = root / path.lstrip("/")
            found += [own, *(one for one in own.parents if one.is_relative_to(root))]
    return found
