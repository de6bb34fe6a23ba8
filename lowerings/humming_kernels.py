"""The Triton kernels around humming's products: lists of rows, gate, sum.

T tokens, H hidden, I intermediate, E local experts, K experts per token. A contribution is (token,
slot), numbered token * K + slot. Products come by contribution, rounded to the output dtype and
without the channels' own scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_math import apply_gate


@triton.jit
def lists_kernel(
    rows_ptr,  # [tile bound * BLOCK_M] int32: contribution of each row of a tile, or T*K
    experts_ptr,  # [tile bound] int32: expert of each tile
    count_ptr,  # [1] int32: rows of all tiles
    order_ptr,
    tiles_ptr,
    num_contributions,
    BLOCK_M: tl.constexpr,
    PADDED: tl.constexpr,  # the power of two from BLOCK_M on
):
    """Write the rows of one tile out, from a plan of positions (see routing.Plan)."""
    tile = tl.program_id(0)
    num_tiles = tl.load(tiles_ptr)
    if tile == 0:
        tl.store(count_ptr, num_tiles * BLOCK_M)
    if tile < num_tiles:
        entry_ptr = tiles_ptr + 3 * (1 + tile)
        row = tl.arange(0, PADDED)
        position = tl.load(entry_ptr + 1) + row
        is_live = position < tl.load(entry_ptr + 2)
        contribution = tl.load(order_ptr + position, mask=is_live, other=num_contributions)
        tl.store(rows_ptr + tile * BLOCK_M + row, contribution, mask=row < BLOCK_M)
        tl.store(experts_ptr + tile, tl.load(entry_ptr))


@triton.jit
def gate_kernel(
    out_ptr,  # [T*K, I], the output dtype
    product_ptr,  # [T*K, 2*I]: gate columns, then up columns
    scale_ptr,  # [E, 2*I] fp32
    local_ptr,
    width,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply scales and gate: out = round(f(h[:I] * scale[:I]) * (h[I:] * scale[I:] + beta)).

    A contribution that does not count was not computed, and gives 0.
    """
    column_blocks = tl.cdiv(width, BLOCK)
    contribution = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    expert = tl.load(local_ptr + contribution).to(tl.int64)
    is_live = is_inside & (expert >= 0)
    row_ptr = product_ptr + contribution * 2 * width
    scale_row_ptr = scale_ptr + expert * 2 * width
    gate = tl.load(row_ptr + column, mask=is_live, other=0.0).to(tl.float32)
    gate *= tl.load(scale_row_ptr + column, mask=is_live, other=0.0)
    up = tl.load(row_ptr + width + column, mask=is_live, other=0.0).to(tl.float32)
    up *= tl.load(scale_row_ptr + width + column, mask=is_live, other=0.0)
    value = apply_gate(gate, up, ALPHA, BETA, LIMIT, "silu", True, HAS_LIMIT)
    out_row_ptr = out_ptr + contribution * width
    tl.store(out_row_ptr + column, value.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def sum_kernel(
    out_ptr,  # [T, H], the output dtype
    product_ptr,  # [T*K, H]
    scale_ptr,  # [E, H] fp32
    weights_ptr,
    local_ptr,
    width,
    stride_rt,
    stride_rk,
    TOP_K: tl.constexpr,
    HAS_ROUTER_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a token's contributions in slot order: out += round(h * scale * router weight)."""
    column_blocks = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        contribution = token * TOP_K + slot
        expert = tl.load(local_ptr + contribution).to(tl.int64)
        is_live = is_inside & (expert >= 0)
        product_row_ptr = product_ptr + contribution * width
        value = tl.load(product_row_ptr + column, mask=is_live, other=0.0).to(tl.float32)
        value *= tl.load(scale_ptr + expert * width + column, mask=is_live, other=0.0)
        if HAS_ROUTER_WEIGHT:
            weight_ptr = weights_ptr + token * stride_rt + slot * stride_rk
            weight = tl.load(weight_ptr, mask=expert >= 0, other=0.0)
            value *= weight.to(tl.float32)
        total += value.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=is_inside)
