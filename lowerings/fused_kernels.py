"""Grouped products with loads by descriptor, persistent programs and quantisation by given scales.

T tokens, H hidden, I intermediate, E local experts, K experts per token; positions as in
tile_products.py, whose epilogues these kernels share. Rows and weights come by pointers or by
tensor descriptors (TMA): LOADS is "pointers", "weights" (only those by descriptor) or "both",
where activations lie in expert order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_math import encode
from .tile_products import (
    gated_value,
    multiply_add,
    products,
    row_scales,
    split_panels,
    tile_of,
    weight_rows,
    weighted_value,
)


@triton.jit
def descriptor_products(
    a,  # descriptor of [T*K, depth] for "both", else [BM, 1] pointers
    w_desc,  # of [E * panels, width, depth], read by [panels, BN, BK]
    first,  # first row of a in its descriptor
    panel,  # first panel of the expert
    column,  # first column of the tile
    depth,
    stride_ak,
    GATED: tl.constexpr,
    LOADS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return a @ w.T in int32, gate and up side by side; past its end a descriptor reads zeros."""
    COLUMNS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    acc = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.int32)
    for start in range(0, depth, BLOCK_K):
        if LOADS == "both":
            codes = a.load([first, start])
        else:
            k = start + tl.arange(0, BLOCK_K)
            a_ptrs = a + k[None, :] * stride_ak  # [BM, BK]
            if EVEN_K:
                codes = tl.load(a_ptrs)
            else:
                codes = tl.load(a_ptrs, mask=(k < depth)[None, :], other=0)
        w = tl.reshape(w_desc.load([panel, column, start]), (COLUMNS, BLOCK_K))
        acc = multiply_add(codes, w.T, acc, True)
    return acc


@triton.jit
def tile_sums(
    a,
    w,
    expert: tl.tensor,  # int64
    first,
    row: tl.tensor,  # [BM] int64: where a's rows are, unless they lie in order
    column,
    width,
    depth,
    stride_am,
    stride_ak,
    stride_we,
    stride_wn,
    up_offset,
    GATED: tl.constexpr,
    LOADS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the int32 sums of one tile, loaded as LOADS says, gate and up side by side."""
    rows = a
    if LOADS != "both":
        rows = (a + row * stride_am)[:, None]
    if LOADS == "pointers":
        w_rows = weight_rows(
            w, expert, column, width, stride_we, stride_wn, up_offset, GATED, BLOCK_N
        )
        return products(
            rows,
            w_rows[None, :],
            depth,
            stride_ak,
            GATED,
            True,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    else:
        return descriptor_products(
            rows,
            w,
            first,
            expert.to(tl.int32) * (2 if GATED else 1),
            column,
            depth,
            stride_ak,
            GATED,
            LOADS,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )


@triton.jit
def rows_of(tiles_ptr, tile, BLOCK_M: tl.constexpr):
    """Return a tile's expert, first and end position, its positions [BM], and rows [BM] to read.

    Positions run on past the end; rows repeat the last one there.
    """
    tile_ptr = tiles_ptr + 3 * (1 + tile)
    first = tl.load(tile_ptr + 1)
    end = tl.load(tile_ptr + 2)
    position = first + tl.arange(0, BLOCK_M)
    row = tl.minimum(position, end - 1).to(tl.int64)
    return tl.load(tile_ptr).to(tl.int64), first, end, position, row


@triton.jit
def rounded(value: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return values in a dtype given by name, which a graph can print where no buffer has it."""
    if DTYPE == "bfloat16":
        return value.to(tl.bfloat16)
    elif DTYPE == "float16":
        return value.to(tl.float16)
    else:
        tl.static_assert(DTYPE == "float32", "unknown dtype")
        return value


@triton.jit
def fused_up_kernel(
    out_ptr,  # [T*K, I] by position, in the result dtype, or codes if IS_STATIC
    code_scale_ptr,  # IS_STATIC: one value
    a,
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
    DTYPE: tl.constexpr,  # name of the result dtype
    IS_STATIC: tl.constexpr,  # quantised here by a given scale
    FLATTEN: tl.constexpr,
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
        expert, first, end, position, row = rows_of(tiles_ptr, tile, BLOCK_M)
        if LOADS != "both":
            row = (tl.load(order_ptr + row) // top_k).to(tl.int64)
        column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.minimum(column, width - 1)
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
        a_scale = row_scales(a_scale_ptr, row, True, HAS_ROW_SCALE)
        value = gated_value(
            gate,
            up,
            a_scale,
            w_scale_ptr,
            bias_ptr,
            expert,
            inside,
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
            tl.store(out_ptr + at, encode(value.to(tl.float32), scale), mask=is_inside)
        else:
            tl.store(out_ptr + at, value, mask=is_inside)


@triton.jit
def fused_down_kernel(
    out_ptr,  # [T*K, H] by contribution
    a,  # [T*K, I] by position: pointers, or a descriptor for "both"
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
        expert, first, end, position, row = rows_of(tiles_ptr, tile, BLOCK_M)
        contribution = tl.load(order_ptr + row)
        column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.minimum(column, width - 1)
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
            inside,
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
