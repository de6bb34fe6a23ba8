"""Grouped products, by descriptor or pointers, persistent or not, quantising by given scales.

T tokens, H hidden, I intermediate, E local experts, K experts per token; tiles as in
fused_rows.py, epilogues as in tile_epilogues.py. With PARTS = 2 an expert's last tile, where it
has at most half the rows, is multiplied as half a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent_launch import FIRST_PROGRAMS, fetch_ahead, let_next_start, wait_for_earlier
from .fused_rows import down_rows, up_rows
from .tile_products import tile_of, weight_rows


@triton.jit
def turns_of(programs, PERSISTENT: tl.constexpr):
    """Return how many tiles a program takes: one, which leaves no loop, or what falls to it."""
    if PERSISTENT:
        return tl.cdiv(programs - tl.program_id(0), tl.num_programs(0))
    else:
        return tl.constexpr(1)


@triton.jit
def is_part(tiles_ptr, tile, part: tl.constexpr, BLOCK_M: tl.constexpr):
    """Say whether a tile is multiplied as half a tile (part 0) or as a whole one (part 1)."""
    tile_ptr = tiles_ptr + 3 * (1 + tile)
    is_short = tl.load(tile_ptr + 2) - tl.load(tile_ptr + 1) <= BLOCK_M // 2
    return is_short if part == 0 else (is_short == 0)


@triton.jit
def fused_up_kernel(
    out_ptr,  # [T*K, I] by position, in the result dtype, or codes if IS_STATIC
    code_scale_ptr,  # IS_STATIC: one value
    a,
    a_half,  # LOADS "both" and PARTS 2: as a, read by half a tile
    a_scale_ptr,
    w,
    w_scale_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    w_ptr,  # the weights, also where w is a descriptor
    num_experts,
    top_k,
    depth,
    width,
    stride_am,
    stride_ak,
    stride_we,
    stride_wn,
    up_offset,  # elements from a gate row to its up row
    ALPHA: tl.constexpr,  # numbers of the gate: as arguments a graph would pass them in fp64
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    LOADS: tl.constexpr,
    DTYPE: tl.constexpr,  # name of the result dtype
    IS_STATIC: tl.constexpr,  # quantised here by a given scale
    PERSISTENT: tl.constexpr,  # a program takes one tile after another
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    LINES: tl.constexpr,  # see fetch_ahead
    PDL: tl.constexpr = False,
):
    """First product with gate, its result quantised at once where the scale is given.

    h = dequantize(a @ w13[expert].T) + bias; out = round(f(h[:I]) * (h[I:] + beta))
    """
    column_blocks = tl.cdiv(width, BLOCK_N)
    if PDL and LINES > 0:
        # The tiles are not known yet. With one for each expert they would be these.
        expert, column_block = tl.program_id(0) // column_blocks, tl.program_id(0) % column_blocks
        if (expert < num_experts) & (tl.program_id(0) < FIRST_PROGRAMS):
            fetch_ahead(
                weight_rows(
                    w_ptr,
                    expert.to(tl.int64),
                    column_block * BLOCK_N,
                    width,
                    stride_we,
                    stride_wn,
                    up_offset,
                    GATED,
                    BLOCK_N,
                ),
                depth,
                LINES,
            )
    wait_for_earlier(PDL)
    let_next_start(PDL)
    num_tiles = tl.load(tiles_ptr)
    programs = num_tiles * column_blocks
    turns = turns_of(programs, PERSISTENT)
    for turn in tl.range(0, turns, flatten=FLATTEN):
        pid = tl.program_id(0) + turn * tl.num_programs(0)
        if PERSISTENT or (pid < programs):
            tile, column_block = tile_of(pid, num_tiles, column_blocks, GROUP_M)
            for part in tl.static_range(PARTS):
                if (PARTS == 1) or is_part(tiles_ptr, tile, part, BLOCK_M):
                    up_rows(
                        out_ptr,
                        code_scale_ptr,
                        a_half if (PARTS == 2 and part == 0 and LOADS == "both") else a,
                        a_scale_ptr,
                        w,
                        w_scale_ptr,
                        bias_ptr,
                        order_ptr,
                        tiles_ptr,
                        tile,
                        column_block,
                        top_k,
                        depth,
                        width,
                        stride_am,
                        stride_ak,
                        stride_we,
                        stride_wn,
                        up_offset,
                        ALPHA,
                        BETA,
                        LIMIT,
                        ACTIVATION,
                        GATED,
                        HAS_BIAS,
                        HAS_LIMIT,
                        HAS_ROW_SCALE,
                        SCALE_COLUMNS,
                        LOADS,
                        DTYPE,
                        IS_STATIC,
                        EVEN_K,
                        BLOCK_M >> (PARTS - 1 - part),
                        BLOCK_N,
                        BLOCK_K,
                    )


@triton.jit
def fused_down_kernel(
    out_ptr,  # [T*K, H] by contribution
    a,  # [T*K, I] by position: pointers, or a descriptor for "both"
    a_half,  # LOADS "both" and PARTS 2: as a, read by half a tile
    a_scale_ptr,
    w,
    w_scale_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    w_ptr,  # the weights, also where w is a descriptor
    top_k,
    depth,
    width,
    stride_am,
    stride_we,
    stride_wn,
    stride_rt,
    stride_rk,
    HAS_BIAS: tl.constexpr,
    HAS_ROUTER_WEIGHT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    LOADS: tl.constexpr,
    PERSISTENT: tl.constexpr,  # a program takes one tile after another
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    LINES: tl.constexpr,  # see fetch_ahead
    PDL: tl.constexpr = False,
):
    """Second product: out[contribution] = round((a @ w2.T dequantised + bias) * router weight)."""
    column_blocks = tl.cdiv(width, BLOCK_N)
    num_tiles = tl.load(tiles_ptr)
    programs = num_tiles * column_blocks
    if PDL and LINES > 0:
        is_first = tl.program_id(0) < tl.minimum(programs, FIRST_PROGRAMS)
        if is_first:
            tile, column_block = tile_of(tl.program_id(0), num_tiles, column_blocks, GROUP_M)
            expert = tl.load(tiles_ptr + 3 * (1 + tile)).to(tl.int64)
            first = column_block * BLOCK_N
            rows = weight_rows(w_ptr, expert, first, width, stride_we, stride_wn, 0, False, BLOCK_N)
            fetch_ahead(rows, depth, LINES)
    wait_for_earlier(PDL)
    let_next_start(PDL)
    turns = turns_of(programs, PERSISTENT)
    for turn in tl.range(0, turns, flatten=FLATTEN):
        pid = tl.program_id(0) + turn * tl.num_programs(0)
        if PERSISTENT or (pid < programs):
            tile, column_block = tile_of(pid, num_tiles, column_blocks, GROUP_M)
            for part in tl.static_range(PARTS):
                if (PARTS == 1) or is_part(tiles_ptr, tile, part, BLOCK_M):
                    down_rows(
                        out_ptr,
                        a_half if (PARTS == 2 and part == 0 and LOADS == "both") else a,
                        a_scale_ptr,
                        w,
                        w_scale_ptr,
                        bias_ptr,
                        weights_ptr,
                        order_ptr,
                        tiles_ptr,
                        tile,
                        column_block,
                        top_k,
                        depth,
                        width,
                        stride_am,
                        stride_we,
                        stride_wn,
                        stride_rt,
                        stride_rk,
                        HAS_BIAS,
                        HAS_ROUTER_WEIGHT,
                        HAS_ROW_SCALE,
                        SCALE_COLUMNS,
                        LOADS,
                        EVEN_K,
                        BLOCK_M >> (PARTS - 1 - part),
                        BLOCK_N,
                        BLOCK_K,
                    )
