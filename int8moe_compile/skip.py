"""Match the names of modules that a user leaves out, and tell which patterns left out nothing."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Iterator, Sequence


def matching_pattern(name: str, patterns: Sequence[str]) -> str | None:
    """Return the first fnmatch pattern of a module's name or of one outside it, None if none."""
    names = list(_with_outer(name))
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(one, pattern) for one in names):
            return pattern
    return None


def matching_part(name: str, parts: Sequence[str]) -> str | None:
    """Return the first of dotted parts that a module's name holds between dots, None if none."""
    return next((part for part in parts if f".{part}." in f".{name}."), None)


def warn_unmatched(argument: str, unmatched: Iterable[str]) -> None:
    """Warn once about patterns that no experts module has."""
    shown = ", ".join(repr(pattern) for pattern in dict.fromkeys(unmatched))
    if shown:
        warnings.warn(
            f"{argument}: no experts module or module around one matches {shown}",
            UserWarning,
            stacklevel=3,
        )


def _with_outer(name: str) -> Iterator[str]:
    """Yield a dotted name and those of the modules around it, but for the model itself."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
