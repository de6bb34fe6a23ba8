"""Read single entries of a ``quantization_config``, and name those of a wrong type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .errors import CheckpointError


class MalformedError(CheckpointError):
    """Refuse an entry that no reader of its format could take, int8 experts or not."""


def malformed(field: str, wanted: str, got: object) -> MalformedError:
    """Return the error that names an entry, what was wanted, and what it is."""
    place = f"quantization_config: {field}" if field else "quantization_config"
    return MalformedError(f"{place}: wanted {wanted}, got {got!r:.80}")


def mapping(field: str, value: object) -> Mapping[str, Any]:
    """Return a mapping; None is an empty one."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    raise malformed(field, "a mapping", value)


def strings(field: str, value: object) -> tuple[str, ...]:
    """Return a list of strings, however it was written; None is an empty one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, (Mapping, bytes)):
        found = tuple(value)
        if all(isinstance(item, str) for item in found):
            return found
    raise malformed(field, "a list of strings", value)


def patterns(argument: str, value: object) -> tuple[str, ...]:
    """Return the strings that a user gave, one or several; raises TypeError naming the argument."""
    try:
        return strings(argument, value)
    except MalformedError:
        raise TypeError(
            f"{argument}: wanted a string or a list of strings, got {value!r:.80}"
        ) from None


def integer(field: str, value: object) -> int:
    """Return an integer; a string of digits is as wrong as any other string."""
    if type(value) is int:
        return value
    raise malformed(field, "an integer", value)


def boolean(field: str, value: object) -> bool:
    """Return a boolean."""
    if isinstance(value, bool):
        return value
    raise malformed(field, "true or false", value)
