"""Eager calls that are repeated, in Triton's interpreter; a file of its own, for it takes long."""

from __future__ import annotations

import own_process


def test_repeated_calls_in_the_interpreter() -> None:
    own_process.run("interpreted_prepared.py", TRITON_INTERPRET="1")
