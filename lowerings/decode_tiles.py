"""Tiles of the "decode" variant, as measured; host only, needs no GPU.

An H200, over the shapes of benchmarks/shapes.py. From benchmarks/sweep_decode.py, beside floats
from an earlier form of it over more tiles. A tile is columns, codes of a row at a time, and warps.
"""

from __future__ import annotations

from typing import Final

from . import tiles
from .tiles import Product, Tile

# Words that a warp of the second product holds; codes of a small expert.
WORDS: Final = 4096
SMALL_EXPERT: Final = 16 << 20
# Beside bf16 and fp16, for one token: of large experts, of small ones whose programs are all there
# at once, and of others; then of large experts by slots of a token, and of small ones, up to four
# slots and more. For other tiles Triton's layouts may not be those that decode_products.add_words
# takes, and for these in other places: (2, 256, 4) beside two slots has one word a thread.
FLOAT_FIRST: Final = (Tile(1, 1, 512, 1, 1), Tile(1, 4, 512, 1, 1), Tile(1, 4, 256, 1, 1))
FLOAT_SECOND: Final = {
    1: Tile(1, 2, 512, 1, 1),
    2: Tile(1, 2, 512, 2, 1),
    4: Tile(1, 2, 256, 4, 1),
}
SMALL_FLOAT_SECOND: Final = (Tile(1, 1, 512, 1, 1), Tile(1, 1, 256, 1, 1))
# Programs of the first product, of 160 registers a thread (Triton 3.6), that an H200 holds.
FLOAT_PROGRAMS: Final = 1584


def has_small_experts(up: Product, down: Product) -> bool:
    """Say whether an expert has few codes."""
    return up.panels * up.depth * up.width + down.depth * down.width <= SMALL_EXPERT


def choose_pair(up: Product, down: Product) -> tuple[Tile, Tile]:
    """Return the tiles of both products, which may multiply floats of different dtypes."""
    is_small = has_small_experts(up, down)
    slots = tiles.whole_slots(down.top_k)
    first, second = whole_first(up.depth, up.panels), whole_second(down.depth, slots, down.a_bytes)
    if up.a_bytes == 2:
        is_at_once = up.contributions * tiles.ceil_div(up.width, 4) <= FLOAT_PROGRAMS
        large, small, less = FLOAT_FIRST
        first = (small if is_at_once else less) if is_small else large
    if down.a_bytes == 2:
        large, small, less = float_second(slots)
        second = (less if slots > 4 else small) if is_small else large
    return first, second


def float_second(slots: int) -> tuple[Tile, ...]:
    """Return the tiles of the second product beside bf16 and fp16, for so many slots of a token."""
    return (FLOAT_SECOND[min(4, slots)], *SMALL_FLOAT_SECOND)


def whole_first(depth: int, panels: int) -> Tile:
    """Return the tile of whole rows for the first product of gate and up, or of one panel."""
    block_k = tiles.whole_row(depth)
    return Tile(1, 4 // panels, block_k, max(1, min(4, block_k // 1024)), 1)


def whole_second(depth: int, slots: int, a_bytes: int) -> Tile:
    """Return the tile of whole rows for the second product: 128 words of codes a thread.

    They were fastest in one warp where that holds a column or two of all slots; floats, which no
    tensor core multiplies, take more registers.
    """
    block_k = tiles.whole_row(depth)
    words = slots * block_k // 4
    warps = min(8, max(1, words // WORDS) * (4 if a_bytes > 1 else 1))
    return Tile(1, max(1, min(4, WORDS // words)), block_k, warps, 1)
