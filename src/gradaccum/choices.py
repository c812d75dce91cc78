"""Words that a user chooses from."""

from collections.abc import Sequence

from gradaccum.errors import ArgumentError


def require_one_of(name: str, value: object, allowed: Sequence[str], *, call: str) -> None:
    """Refuse a word that is none of some.

    Args:
        name: Of the argument.
        value: What the user passed.
        allowed: The words; the first is the default.
        call: What was called, in the user's spelling: ``accumulator``.

    Raises:
        ArgumentError: It is another.
    """
    if value not in allowed:
        raise ArgumentError(
            f"{call}({name}={value!r})",
            expected=" or ".join(map(repr, allowed)),
            got=repr(value),
            remedy=f"Pass {name}={allowed[0]!r}, the default.",
        )
