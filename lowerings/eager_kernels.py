"""The Triton kernels of eager CUDA calls: quantise, two grouped products, combine.

T tokens, H hidden, I intermediate, E local experts, K experts per token. What a tile computes
stands in tile_products.py, tile_epilogues.py and tile_math.py, where the Inductor templates take it
from, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent_launch import wait_for_earlier
from .tile_math import encode, magnitude_bits, scale_of
from .tile_products import down_tile, tile_of, up_tile


@triton.jit
def load_rows(
    x_ptr,
    weight_ptr,
    row,  # [ROWS] int64
    is_live,  # [ROWS]
    start,
    columns,
    stride_xr,
    stride_xc,
    stride_rt,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return rows from one column on in fp32, times the router weight where that is on the input.

    Rows that do not count and columns past the end are 0.
    """
    column = start + tl.arange(0, BLOCK)
    is_inside = is_live[:, None] & (column < columns)[None, :]
    x_ptrs = x_ptr + (row * stride_xr)[:, None] + column.to(tl.int64)[None, :] * stride_xc
    x = tl.load(x_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + row * stride_rt, mask=is_live, other=0.0)
        x = x * weight.to(tl.float32)[:, None]
    return x, column, is_inside


@triton.jit
def rows_of(
    num_rows,
    live_ptr,
    local_ptr,
    HAS_LIVE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return a program's rows and which count: the live ones, or those with a live contribution."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_live = row < num_rows
    if HAS_LIVE:
        is_live = row < tl.load(live_ptr + 1)
    if HAS_WEIGHT:
        is_live = is_live & (tl.load(local_ptr + row, mask=is_live, other=-1) >= 0)
    return row, is_live


@triton.jit
def amax_kernel(
    bits_ptr,  # [1] int32, zero before
    x_ptr,
    weight_ptr,
    live_ptr,
    local_ptr,
    num_rows,
    columns,
    stride_xr,
    stride_xc,
    stride_rt,
    HAS_WEIGHT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the greatest magnitude of all rows that count, as the bits of a non-negative float."""
    row, is_live = rows_of(num_rows, live_ptr, local_ptr, HAS_LIVE, HAS_WEIGHT, ROWS)
    amax = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, columns, BLOCK):
        x, _, _ = load_rows(
            x_ptr,
            weight_ptr,
            row,
            is_live,
            start,
            columns,
            stride_xr,
            stride_xc,
            stride_rt,
            HAS_WEIGHT,
            BLOCK,
        )
        amax = tl.maximum(amax, magnitude_bits(x))
    tl.atomic_max(bits_ptr, tl.max(tl.max(amax, axis=1), axis=0))


@triton.jit
def quantize_kernel(
    codes_ptr,  # [rows, columns] int8
    scale_out_ptr,  # [rows] fp32 for "token", [1] for "tensor"
    x_ptr,
    given_ptr,  # "static": fp32 scale; "tensor": bits of the greatest magnitude
    weight_ptr,
    live_ptr,
    local_ptr,
    num_rows,
    columns,
    stride_xr,
    stride_xc,
    stride_rt,
    QUANT: tl.constexpr,  # "token", "tensor" or "static"
    HAS_WEIGHT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # a row fits into one block and is read once
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise rows: scale = amax / 127; codes = round(x / scale)."""
    row, is_live = rows_of(num_rows, live_ptr, local_ptr, HAS_LIVE, HAS_WEIGHT, ROWS)
    x, column, is_inside = load_rows(
        x_ptr,
        weight_ptr,
        row,
        is_live,
        0,
        columns,
        stride_xr,
        stride_xc,
        stride_rt,
        HAS_WEIGHT,
        BLOCK,
    )
    if QUANT == "token":
        amax = magnitude_bits(x)
        if not ONE_BLOCK:
            for start in range(BLOCK, columns, BLOCK):
                more, _, _ = load_rows(
                    x_ptr,
                    weight_ptr,
                    row,
                    is_live,
                    start,
                    columns,
                    stride_xr,
                    stride_xc,
                    stride_rt,
                    HAS_WEIGHT,
                    BLOCK,
                )
                amax = tl.maximum(amax, magnitude_bits(more))
        row_scale = scale_of(tl.max(amax, axis=1))
        tl.store(scale_out_ptr + row, row_scale, mask=is_live)
        scale = row_scale[:, None]
    elif QUANT == "tensor":
        scale = scale_of(tl.load(given_ptr))
        if tl.program_id(0) == 0:
            tl.store(scale_out_ptr, scale)
    else:
        scale = tl.load(given_ptr)
    code_row = codes_ptr + (row * columns)[:, None]
    tl.store(code_row + column[None, :], encode(x, scale), mask=is_inside)
    if not ONE_BLOCK:
        for start in range(BLOCK, columns, BLOCK):
            x, column, is_inside = load_rows(
                x_ptr,
                weight_ptr,
                row,
                is_live,
                start,
                columns,
                stride_xr,
                stride_xc,
                stride_rt,
                HAS_WEIGHT,
                BLOCK,
            )
            tl.store(code_row + column[None, :], encode(x, scale), mask=is_inside)


@triton.jit
def weight_rows_kernel(
    out_ptr,  # [T, columns], the dtype of x
    x_ptr,
    weight_ptr,
    local_ptr,
    num_rows,
    columns,
    stride_xr,
    stride_xc,
    stride_rt,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply live rows by their router weight in fp32 and round once, for weight-only experts."""
    row, is_live = rows_of(num_rows, local_ptr, local_ptr, False, True, ROWS)
    for start in range(0, columns, BLOCK):
        x, column, is_inside = load_rows(
            x_ptr,
            weight_ptr,
            row,
            is_live,
            start,
            columns,
            stride_xr,
            stride_xc,
            stride_rt,
            True,
            BLOCK,
        )
        tl.store(out_ptr + (row * columns)[:, None] + column[None, :], x, mask=is_inside)


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
    ALPHA: tl.constexpr,  # numbers of the gate: as arguments a graph would pass them in fp64
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    PACKED: tl.constexpr,
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
            ALPHA,
            BETA,
            LIMIT,
            ACTIVATION,
            GATED,
            HAS_BIAS,
            HAS_LIMIT,
            INTEGER,
            PACKED,
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
    PACKED: tl.constexpr,
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
            PACKED,
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
    PDL: tl.constexpr = False,
):
    """Sum a token's live contributions in fp32 in slot order; the others are selected away."""
    wait_for_earlier(PDL)
    column_blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        is_live = tl.load(local_ptr + token * TOP_K + slot) >= 0
        row = contributions_ptr + (token * TOP_K + slot) * width
        # Read for the last time: what stream_kernels.py keeps in L2 need not stay.
        is_wanted = is_inside & is_live
        value = tl.load(row + column, mask=is_wanted, other=0.0, eviction_policy="evict_first")
        total += value.to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=is_inside)
