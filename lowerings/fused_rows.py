"""One tile of each grouped product, loaded as fused_tiles.py does, to its store.

T tokens, H hidden, I intermediate, E local experts, K experts per token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_tiles import rounded, rows_of, tile_sums
from .tile_epilogues import gated_value, row_scales, weighted_value
from .tile_math import encode
from .tile_products import split_panels


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
