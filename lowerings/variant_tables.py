"""Tiles of the "fused" variant by rows an expert, as measured; host only, needs no GPU.

An H200, over the shapes of benchmarks/shapes.py: (rows an expert gets on average, at most, tiles of
both products), rising. From benchmarks/sweep_tiles.py --fused and, for loads "async" and "stream",
earlier forms of benchmarks/bench_experts.py --variants.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .tiles import FEW_EXPERTS, Product, Tile

Table = tuple[tuple[float, Tile, Tile], ...]

# Descriptors are read in rows of so many codes: what a depth leaves over is multiplied as zeros.
DESCRIPTOR_K: Final = 128
# No faster than "apart" up to so many rows.
FEW_ROWS: Final = 24
NARROW: Final = Tile(64, 128, 128, 4, 3, 1, "both")
WIDE: Final = Tile(128, 128, 128, 4, 3, 8, "both", 2, has_tail=True)
FUSED: Final[Table] = (
    (48, Tile(64, 64, 128, 4, 4, 1, "weights"), NARROW),
    (160, Tile(128, 128, 128, 8, 4, 1, "weights", has_tail=True), replace(WIDE, programs=0)),
    (float("inf"), Tile(128, 64, 128, 4, 3, 32, "weights", has_tail=True), WIDE),
)
# Few experts: an expert has so many tiles that their groups stay in L2 longer.
FEW_EXPERTS_FUSED: Final[Table] = (
    *FUSED[:2],
    (512, Tile(128, 128, 128, 8, 4, 32, "weights", has_tail=True), WIDE),
    (float("inf"), Tile(128, 64, 128, 4, 3, 8, "weights", 2, has_tail=True), WIDE),
)
# A depth that is no multiple of DESCRIPTOR_K costs loads by pointer their masks or half the tile.
UNEVEN_FUSED: Final[Table] = (
    (12, Tile(16, 64, 128, 4, 6, 1, "weights"), Tile(16, 64, 128, 4, 6, 1, "both")),
    (24, Tile(32, 64, 128, 4, 6, 1, "weights"), Tile(32, 64, 128, 4, 6, 1, "both")),
    (64, Tile(64, 64, 128, 4, 3, 1, "both"), NARROW),
    (160, Tile(128, 64, 128, 4, 3, 1, "both", has_tail=True), replace(WIDE, programs=0)),
    (float("inf"), Tile(128, 64, 128, 4, 3, 8, "both", 2, has_tail=True), WIDE),
)
# Products that run on while data arrive. Two programs of four warps stay on a multiprocessor, or
# one of eight, whose tiles load less a product: better where a deep product leaves few epilogues.
ASYNC: Final = Tile(128, 64, 128, 4, 3, 8, "async", 2)
ASYNC_DOWN: Final = Tile(128, 128, 128, 4, 3, 8, "async", 2, has_tail=True)
ASYNC_WIDE: Final = Tile(128, 128, 128, 8, 4, 8, "async", 1)
ASYNC_WIDE_DOWN: Final = Tile(128, 256, 128, 8, 4, 8, "async", 1)
ASYNC_TAIL: Final = replace(ASYNC_WIDE, group_m=1, has_tail=True)
# Shallower layers than those measured (from 768 on) by half at most.
LEAST_ASYNC_DEPTH: Final = 384
ASYNC_PAIRS: Final = (
    (ASYNC, ASYNC_DOWN),
    (ASYNC_TAIL, ASYNC_DOWN),
    (ASYNC_WIDE, ASYNC_WIDE_DOWN),
)
ASYNC_FUSED: Final[Table] = (
    FUSED[0],
    (200, ASYNC_TAIL, ASYNC_DOWN),
    (400, replace(ASYNC, group_m=1, has_tail=True), ASYNC_DOWN),
    (float("inf"), ASYNC, ASYNC_DOWN),
)
DEEP: Final = 4096
DEEP_ASYNC_FUSED: Final[Table] = (
    FUSED[0],
    (100, ASYNC_TAIL, ASYNC_WIDE_DOWN),
    (float("inf"), replace(ASYNC_WIDE, group_m=4), replace(ASYNC_WIDE_DOWN, group_m=4)),
)
UNEVEN_ASYNC_FUSED: Final[Table] = (
    *UNEVEN_FUSED[:3],
    (200, *UNEVEN_FUSED[3][1:]),
    (float("inf"), ASYNC, ASYNC_DOWN),
)
# Both products in one launch, for few rows an expert: in narrow pieces from 8 to 24 rows, and where
# few large experts have so few pieces that the last end late. Tiles in groups wait longer, but
# where some experts have two tiles they find the weights of the first in L2.
STREAM_PAIRS: Final = (
    (Tile(16, 64, 256, 4, 3, 1, "stream", 2), Tile(16, 128, 256, 4, 3, 1, "stream", 2)),
    (Tile(32, 64, 128, 4, 4, 1, "stream", 2), Tile(32, 64, 256, 4, 4, 1, "stream", 2)),
    (Tile(16, 64, 256, 4, 2, 1, "stream", 2), Tile(16, 64, 512, 4, 2, 1, "stream", 2)),
    (Tile(64, 64, 128, 4, 4, 2, "stream", 2), Tile(64, 128, 128, 4, 4, 2, "stream", 2)),
    (Tile(80, 64, 128, 4, 4, 2, "stream", 2), Tile(80, 128, 128, 4, 4, 2, "stream", 2)),
)
STREAM: Final[Table] = (
    (8, *STREAM_PAIRS[0]),
    (FEW_ROWS, *STREAM_PAIRS[1]),
    (50, *STREAM_PAIRS[3]),
    (72, *STREAM_PAIRS[4]),
)
FEW_EXPERTS_STREAM: Final[Table] = ((8, *STREAM_PAIRS[2]), STREAM[1])
DEEP_STREAM: Final[Table] = ((12, *STREAM_PAIRS[0]),)


def is_uneven(up: Product, down: Product) -> bool:
    """Say whether a depth is no multiple of DESCRIPTOR_K."""
    return bool(up.depth % DESCRIPTOR_K or down.depth % DESCRIPTOR_K)


def stream_table(up: Product, down: Product) -> Table:
    """Return the tiles of both products in one launch, for gated layers of some depth."""
    if up.panels == 1 or min(up.depth, down.depth) < LEAST_ASYNC_DEPTH:
        return ()
    if up.experts <= FEW_EXPERTS:
        return FEW_EXPERTS_STREAM
    return DEEP_STREAM if up.depth >= DEEP else STREAM


def fused_table(up: Product, down: Product, *, is_async: bool) -> Table:
    """Return the table of a layer's sizes.

    is_async: for a device and a Triton that have the kernels of loads "async".
    """
    is_async = is_async and min(up.depth, down.depth) >= LEAST_ASYNC_DEPTH
    if is_uneven(up, down):
        return UNEVEN_ASYNC_FUSED if is_async else UNEVEN_FUSED
    if is_async:
        return DEEP_ASYNC_FUSED if up.depth >= DEEP else ASYNC_FUSED
    return FEW_EXPERTS_FUSED if up.experts <= FEW_EXPERTS else FUSED
