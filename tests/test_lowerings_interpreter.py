"""Every Triton kernel in Triton's interpreter against the reference: no GPU needed."""

from __future__ import annotations

import own_process


def test_kernels_in_the_interpreter() -> None:
    own_process.run("interpreted.py", TRITON_INTERPRET="1")


def test_variants_in_the_interpreter() -> None:
    own_process.run("interpreted_variants.py", TRITON_INTERPRET="1")


def test_routing_in_the_interpreter() -> None:
    own_process.run("interpreted_routing.py", TRITON_INTERPRET="1")
