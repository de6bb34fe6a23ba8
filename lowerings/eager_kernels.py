"""The Triton kernels of eager CUDA calls: quantise, two grouped products, combine.

T tokens, H hidden, I intermediate, E local experts, K experts per token. What a tile computes
stands in tile_products.py and tile_math.py, where the Inductor templates take it from, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_math import encode, magnitude_bits, scale_of
from .tile_products import down_tile, tile_of, up_tile


@triton.jit
def weighted_row(x_ptr, weight_ptr, column, is_inside, stride_xc, HAS_WEIGHT: tl.constexpr):
    """Return one row in fp32, times its router weight where that belongs on the input."""
    x = tl.load(x_ptr + column.to(tl.int64) * stride_xc, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        return x * tl.load(weight_ptr).to(tl.float32)
    else:
        return x


@triton.jit
def is_row_live(row, live_ptr, local_ptr, HAS_LIVE: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Say whether a row counts: before the number of live rows, or with a live contribution."""
    if HAS_LIVE:
        return row < tl.load(live_ptr + 1)
    elif HAS_WEIGHT:
        return tl.load(local_ptr + row) >= 0
    else:
        return True


@triton.jit
def amax_kernel(
    bits_ptr,  # [1] int32, zero before
    x_ptr,
    weight_ptr,
    live_ptr,
    local_ptr,
    columns,
    stride_xr,
    stride_xc,
    stride_rt,
    HAS_WEIGHT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the greatest magnitude of all rows that count, as the bits of a non-negative float."""
    row = tl.program_id(0).to(tl.int64)
    if is_row_live(row, live_ptr, local_ptr, HAS_LIVE, HAS_WEIGHT):
        amax = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = weighted_row(
                x_ptr + row * stride_xr,
                weight_ptr + row * stride_rt,
                column,
                column < columns,
                stride_xc,
                HAS_WEIGHT,
            )
            amax = tl.maximum(amax, magnitude_bits(x))
        tl.atomic_max(bits_ptr, tl.max(amax, axis=0))


@triton.jit
def quantize_kernel(
    codes_ptr,  # [rows, columns] int8
    scale_out_ptr,  # [rows] fp32 for "token", [1] for "tensor"
    x_ptr,
    given_ptr,  # "static": fp32 scale; "tensor": bits of the greatest magnitude
    weight_ptr,
    live_ptr,
    local_ptr,
    columns,
    stride_xr,
    stride_xc,
    stride_rt,
    QUANT: tl.constexpr,  # "token", "tensor" or "static"
    HAS_WEIGHT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise one row: scale = amax / 127; codes = round(x / scale)."""
    row = tl.program_id(0).to(tl.int64)
    is_live = is_row_live(row, live_ptr, local_ptr, HAS_LIVE, HAS_WEIGHT)
    if QUANT == "static":
        scale = tl.load(given_ptr)
    elif QUANT == "tensor":
        scale = scale_of(tl.load(given_ptr))
        if row == 0:
            tl.store(scale_out_ptr, scale)
    if is_live:
        x_row = x_ptr + row * stride_xr
        weight = weight_ptr + row * stride_rt
        if QUANT == "token":
            amax = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, columns, BLOCK):
                column = start + tl.arange(0, BLOCK)
                x = weighted_row(x_row, weight, column, column < columns, stride_xc, HAS_WEIGHT)
                amax = tl.maximum(amax, magnitude_bits(x))
            scale = scale_of(tl.max(amax, axis=0))
            tl.store(scale_out_ptr + row, scale)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = weighted_row(x_row, weight, column, column < columns, stride_xc, HAS_WEIGHT)
            tl.store(codes_ptr + row * columns + column, encode(x, scale), mask=column < columns)


@triton.jit
def weight_rows_kernel(
    out_ptr,  # [T, columns], the dtype of x
    x_ptr,
    weight_ptr,
    local_ptr,
    columns,
    stride_xr,
    stride_xc,
    stride_rt,
    BLOCK: tl.constexpr,
):
    """Multiply live rows by their router weight in fp32 and round once, for weight-only experts."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(local_ptr + row) >= 0:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = weighted_row(
                x_ptr + row * stride_xr,
                weight_ptr + row * stride_rt,
                column,
                column < columns,
                stride_xc,
                True,
            )
            tl.store(out_ptr + row * columns + column, x, mask=column < columns)


@triton.jit
def up_kernel(
    out_ptr,  # [T*K, I] by position
    a_ptr,
    a_scale_ptr,
    w_ptr,
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
    up_offset,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """First product with gate: out[position] = round(f(h[:I]) * (h[I:] + beta))."""
    column_blocks = tl.cdiv(width, BLOCK_N)
    num_tiles = tl.load(tiles_ptr)
    pid = tl.program_id(0)
    if pid < num_tiles * column_blocks:
        tile, column_block = tile_of(pid, num_tiles, column_blocks, GROUP_M)
        value, position, column, is_row = up_tile(
            a_ptr,
            a_scale_ptr,
            w_ptr,
            w_scale_ptr,
            bias_ptr,
            order_ptr,
            tiles_ptr + 3 * (1 + tile),
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
            ACTIVATION,
            GATED,
            HAS_BIAS,
            HAS_LIMIT,
            INTEGER,
            HAS_ROW_SCALE,
            SCALE_COLUMNS,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        out_ptrs = out_ptr + position.to(tl.int64)[:, None] * width + column[None, :]
        is_inside = is_row[:, None] & (column < width)[None, :]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def down_kernel(
    out_ptr,  # [T*K, H] by contribution
    a_ptr,
    a_scale_ptr,
    w_ptr,
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
    INTEGER: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Second product: out[contribution] = round((a @ w2.T dequantised + bias) * router weight)."""
    column_blocks = tl.cdiv(width, BLOCK_N)
    num_tiles = tl.load(tiles_ptr)
    pid = tl.program_id(0)
    if pid < num_tiles * column_blocks:
        tile, column_block = tile_of(pid, num_tiles, column_blocks, GROUP_M)
        value, contribution, column, is_row = down_tile(
            a_ptr,
            a_scale_ptr,
            w_ptr,
            w_scale_ptr,
            bias_ptr,
            weights_ptr,
            order_ptr,
            tiles_ptr + 3 * (1 + tile),
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
            INTEGER,
            HAS_ROW_SCALE,
            SCALE_COLUMNS,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        out_ptrs = out_ptr + contribution.to(tl.int64)[:, None] * width + column[None, :]
        is_inside = is_row[:, None] & (column < width)[None, :]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def combine_kernel(
    out_ptr,  # [T, H]
    contributions_ptr,  # [T*K, H]
    local_ptr,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a token's live contributions in fp32 in slot order; the others are selected away."""
    column_blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        is_live = tl.load(local_ptr + token * TOP_K + slot) >= 0
        row = contributions_ptr + (token * TOP_K + slot) * width
        value = tl.load(row + column, mask=is_inside & is_live, other=0.0)
        total += value.to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=is_inside)
