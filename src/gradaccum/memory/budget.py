"""A budget: the bytes that a step may use on one device."""

import re
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

from gradaccum.errors import ArgumentError

_UNITS = MappingProxyType(
    {
        "": 1,
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tib": 2**40,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The bytes that a step may use on one device, parameters and optimizer state included.

    Args:
        bytes: How many.
    """

    bytes: int

    @classmethod
    def of(cls, told: "Budget | int | str") -> "Budget":
        """Read a budget.

        Args:
            told: A number of bytes, or a text such as ``"4GiB"``, ``"700 MiB"`` or ``"1.5GB"``.

        Returns:
            The budget.

        Raises:
            ArgumentError: It is no positive number of bytes.

        >>> Budget.of("1.5KiB")
        Budget(bytes=1536)
        """
        if isinstance(told, Budget):
            return told
        found = _parsed(told)
        if found is None or found < 1:
            raise ArgumentError(
                f"memory={told!r}",
                expected='a positive number of bytes, or a text such as "4GiB" or "700MiB"',
                got=repr(told),
                remedy='Pass what a step may use on the device, memory="4GiB" for example.',
            )
        return cls(bytes=found)


def _parsed(told: object) -> int | None:
    if isinstance(told, int) and not isinstance(told, bool):
        return told
    if not isinstance(told, str):
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", told)
    if match is None or match[2].lower() not in _UNITS:
        return None
    size = float(match[1]) * _UNITS[match[2].lower()]
    return int(size) if isfinite(size) else None
