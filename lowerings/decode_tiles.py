"""Tiles of the "decode" variant, as measured; host only, needs no GPU.

An H200, over the shapes of benchmarks/shapes.py. From benchmarks/sweep_decode.py, beside floats
with --quant none.
"""

from __future__ import annotations

from typing import Final

from . import tiles
from .tiles import Product, Tile

# Words that a warp of the second product holds; codes of a small expert.
WORDS: Final = 4096
SMALL_EXPERT: Final = 16 << 20
# Codes of a row that programs take at a time beside floats, and how many programs of the first
# product with the more of them an H200 holds.
FLOAT_DEPTHS: Final = (256, 512)
FLOAT_PROGRAMS: Final = 1584


def has_small_experts(up: Product, down: Product) -> bool:
    """Say whether an expert has few codes."""
    return up.panels * up.depth * up.width + down.depth * down.width <= SMALL_EXPERT


def choose_pair(up: Product, down: Product) -> tuple[Tile, Tile]:
    """Return the tiles of both products: columns, codes of a row at a time, warps."""
    if up.a_bytes == 2:
        return _beside_floats(up, down)
    up_k, down_k = tiles.whole_row(up.depth), tiles.whole_row(down.depth)
    first = Tile(1, 4 // up.panels, up_k, max(1, min(4, up_k // 1024)), 1)
    # Words of codes for one column of all slots. 128 of them a thread were fastest, in one warp
    # where that holds a column or two; floats take more registers.
    words = tiles.whole_slots(down.top_k) * down_k // 4
    warps = min(8, max(1, words // WORDS) * (4 if down.a_bytes > 1 else 1))
    return first, Tile(1, max(1, min(4, WORDS // words)), down_k, warps, 1)


def _beside_floats(up: Product, down: Product) -> tuple[Tile, Tile]:
    """Return tiles for bf16 and fp16, whose programs go along their rows in one warp, or a few.

    Of small experts a program takes four columns of the first product, and half as much at a time
    where more would not be there at once; of the second all slots in one warp.
    """
    slots = tiles.whole_slots(down.top_k)
    least, most = FLOAT_DEPTHS
    if not has_small_experts(up, down):
        depth = least if slots > 2 else most
        return Tile(1, 1, most, 1, 1), Tile(1, 2, depth, min(4, slots), 1)
    is_at_once = up.contributions * tiles.ceil_div(up.width, 4) <= FLOAT_PROGRAMS
    depth = least if slots > 4 else most
    return Tile(1, 4, most if is_at_once else least, 1, 1), Tile(1, 1, depth, 1, 1)
