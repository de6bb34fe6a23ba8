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


def patterns_of(skip: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the patterns of an argument skip; None is the default, none of them."""
    if skip is None or isinstance(skip, str):
        return () if skip is None else (skip,)
    wanted = "skip: wanted a pattern (str) or an iterable of them"
    if not isinstance(skip, Iterable):
        raise TypeError(f"{wanted}, got {type(skip).__name__}")
    patterns = tuple(skip)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{wanted}, got one with {pattern!r}")
    return patterns


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
