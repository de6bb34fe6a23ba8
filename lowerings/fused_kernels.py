"""Grouped products with loads by descriptor and persistent programs, quantising by given scales.

T tokens, H hidden, I intermediate, E local experts, K experts per token; tiles as in
fused_tiles.py, epilogues as in tile_products.py. With PARTS = 2 an expert's last tile, where it
has at most half the rows, is multiplied as half a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_tiles import rounded, rows_of, tile_sums
from .tile_math import encode
from .tile_products import (
    gated_value,
    row_scales,
    split_panels,
    tile_of,
    weighted_value,
)


@triton.jit
def is_part(tiles_ptr, tile, part: tl.constexpr, BLOCK_M: tl.constexpr):
    """Say whether a tile is multiplied as half a tile (part 0) or as a whole one (part 1)."""
    tile_ptr = tiles_ptr + 3 * (1 + tile)
    is_short = tl.load(tile_ptr + 2) - tl.load(tile_ptr + 1) <= BLOCK_M // 2
    return is_short if part == 0 else (is_short == 0)


@triton.jit
def up_rows(
    out_ptr,
    code_scale_ptr,
    a,
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
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    LOADS: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_STATIC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute and store one tile of the first product; arguments as in fused_up_kernel."""
    expert, first, end, position, row = rows_of(tiles_ptr, tile, BLOCK_M)
    if LOADS != "both":
        row = (tl.load(order_ptr + row) // top_k).to(tl.int64)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tile_sums(
        a,
        w,
        expert,
        first,
        row,
        column_block * BLOCK_N,
        width,
        depth,
        stride_am,
        stride_ak,
        stride_we,
        stride_wn,
        up_offset,
        GATED,
        LOADS,
        EVEN_K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    gate, up = split_panels(acc, GATED, BLOCK_M, BLOCK_N)
    value = gated_value(
        gate,
        up,
        row_scales(a_scale_ptr, row, True, HAS_ROW_SCALE),
        w_scale_ptr,
        bias_ptr,
        expert,
        tl.minimum(column, width - 1),
        width,
        alpha,
        beta,
        limit,
        ACTIVATION,
        GATED,
        HAS_BIAS,
        HAS_LIMIT,
        True,
        SCALE_COLUMNS,
    )
    value = rounded(value, DTYPE)
    at = position.to(tl.int64)[:, None] * width + column[None, :]
    is_inside = (position < end)[:, None] & (column < width)[None, :]
    if IS_STATIC:
        scale = tl.load(code_scale_ptr) + tl.zeros((BLOCK_M, 1), tl.float32)
        value = encode(value.to(tl.float32), scale)
    tl.store(out_ptr + at, value, mask=is_inside)


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
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """First product with gate, its result quantised at once where the scale is given.

    h = dequantize(a @ w13[expert].T) + bias; out = round(f(h[:I]) * (h[I:] + beta))
    """
    column_blocks = tl.cdiv(width, BLOCK_N)
    num_tiles = tl.load(tiles_ptr)
    programs = num_tiles * column_blocks
    for pid in tl.range(tl.program_id(0), programs, tl.num_programs(0), flatten=FLATTEN):
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
def down_rows(
    out_ptr,
    a,
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
    HAS_BIAS: tl.constexpr,
    HAS_ROUTER_WEIGHT: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    LOADS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute and store one tile of the second product; arguments as in fused_down_kernel."""
    expert, first, end, position, row = rows_of(tiles_ptr, tile, BLOCK_M)
    contribution = tl.load(order_ptr + row)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tile_sums(
        a,
        w,
        expert,
        first,
        row,
        column_block * BLOCK_N,
        width,
        depth,
        stride_am,
        1,
        stride_we,
        stride_wn,
        0,
        False,
        LOADS,
        EVEN_K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    value = weighted_value(
        acc,
        row_scales(a_scale_ptr, row, True, HAS_ROW_SCALE),
        w_scale_ptr,
        bias_ptr,
        weights_ptr,
        expert,
        contribution,
        tl.minimum(column, width - 1),
        width,
        top_k,
        stride_rt,
        stride_rk,
        HAS_BIAS,
        HAS_ROUTER_WEIGHT,
        True,
        SCALE_COLUMNS,
    )
    at = contribution.to(tl.int64)[:, None] * width + column[None, :]
    is_inside = (position < end)[:, None] & (column < width)[None, :]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=is_inside)


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
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Second product: out[contribution] = round((a @ w2.T dequantised + bias) * router weight)."""
    column_blocks = tl.cdiv(width, BLOCK_N)
    num_tiles = tl.load(tiles_ptr)
    programs = num_tiles * column_blocks
    for pid in tl.range(tl.program_id(0), programs, tl.num_programs(0), flatten=FLATTEN):
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
