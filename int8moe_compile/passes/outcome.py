"""What the pass did with each layer of a graph, kept for explain and for people who ask why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Say whether one layer became int8moe.experts, by which backend, or why not.

    name: dotted name of the module in the compiled root, "" for the root itself.
    """

    name: str
    rewritten: bool
    backend: str | None = None
    reason: str | None = None
