"""A layer for few contributions: no routing, no tile of tokens, the sum over slots in a product.

T tokens, H hidden, I intermediate, E local experts, K experts per token. A program takes whole
rows of an expert's weights and one contribution, or all slots of one token (decode_products.py);
the epilogues are those of tile_epilogues.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_products import row_sums
from .dependent_launch import wait_for_earlier
from .fused_tiles import rounded
from .routing_kernels import local_expert
from .tile_epilogues import gated_value, row_scales, weighted_value
from .tile_math import encode
from .tile_products import split_panels, weight_rows


@triton.jit
def decode_up_kernel(
    out_ptr,  # [T*K, I] by contribution, in the result dtype, or codes if IS_STATIC
    code_scale_ptr,  # IS_STATIC: one value
    a_ptr,  # [T, H] codes or floats, contiguous
    a_scale_ptr,  # INTEGER: [T] fp32, or one value
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    ids_ptr,
    map_ptr,
    num_contributions,
    top_k,
    num_experts,
    map_size,
    depth,
    width,
    stride_it,
    stride_ik,
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
    HAS_MAP: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,  # name of the result dtype
    IS_STATIC: tl.constexpr,  # quantised here by a given scale
    INTEGER: tl.constexpr,
    DOT4: tl.constexpr,
    PACKED: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row, or with TENSOR_CORES part of one
    EVEN_K: tl.constexpr,  # BLOCK_K divides the depth
    IS_OLD: tl.constexpr,  # PDL: ids and weights were there before the kernel ahead started
    PDL: tl.constexpr = False,
):
    """First product of one contribution and some rows of its expert's weights.

    h = dequantize(w13[expert] @ a[token]) + bias; out = round(f(h[:I]) * (h[I:] + beta))
    """
    wait_for_earlier(PDL and not IS_OLD)
    column_blocks = tl.cdiv(width, BLOCK_N)
    contribution = tl.program_id(0) // column_blocks
    found = local_expert(
        ids_ptr,
        map_ptr,
        contribution,
        contribution < num_contributions,
        top_k,
        num_experts,
        map_size,
        stride_it,
        stride_ik,
        HAS_MAP,
        False,
    )
    if found >= 0:
        expert = found.to(tl.int64)
        first = tl.program_id(0) % column_blocks * BLOCK_N
        token = contribution // top_k
        rows = weight_rows(
            w_ptr, expert, first, width, stride_we, stride_wn, up_offset, GATED, BLOCK_N
        )
        a_row = a_ptr + (token + tl.arange(0, 1)).to(tl.int64) * depth
        sums = row_sums(
            a_row[:, None, None],
            rows[None, :, None],
            True,
            depth,
            INTEGER,
            DOT4,
            PACKED,
            TENSOR_CORES,
            BLOCK_K,
            EVEN_K,
            PDL,
        )
        gate, up = split_panels(sums, GATED, 1, BLOCK_N)
        column = first + tl.arange(0, BLOCK_N)
        value = gated_value(
            gate,
            up,
            row_scales(a_scale_ptr, token + tl.arange(0, 1), INTEGER, HAS_ROW_SCALE),
            w_scale_ptr,
            bias_ptr,
            expert,
            tl.minimum(column, width - 1),
            width,
            ALPHA,
            BETA,
            LIMIT,
            ACTIVATION,
            GATED,
            HAS_BIAS,
            HAS_LIMIT,
            INTEGER,
            SCALE_COLUMNS,
        )
        value = rounded(value, DTYPE)
        if IS_STATIC:
            scale = tl.load(code_scale_ptr) + tl.zeros((1, 1), tl.float32)
            value = encode(value.to(tl.float32), scale)
        out_ptrs = out_ptr + contribution.to(tl.int64) * width + column[None, :]
        tl.store(out_ptrs, value, mask=(column < width)[None, :])
    else:
        wait_for_earlier(PDL)


@triton.jit
def sum_of_slots(
    part: tl.tensor,  # [K, BN]
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Return the sum over slots in their order: at each turn all other terms are zeros."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    for turn in tl.static_range(TOP_K):
        is_turn = tl.arange(0, SLOTS)[:, None] == turn
        total += tl.sum(tl.where(is_turn, part, 0.0), axis=0)
    return total


@triton.jit
def decode_down_kernel(
    out_ptr,  # [T, H]
    a_ptr,  # [T*K, I] by contribution: codes or floats
    a_scale_ptr,  # INTEGER: [T*K] fp32, or one value
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    map_ptr,
    num_contributions,
    num_experts,
    map_size,
    depth,
    width,
    stride_it,
    stride_ik,
    stride_we,
    stride_wn,
    stride_rt,
    stride_rk,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    INTEGER: tl.constexpr,
    DOT4: tl.constexpr,
    PACKED: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # K, or the next power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row, or with TENSOR_CORES part of one
    EVEN_K: tl.constexpr,  # BLOCK_K divides the depth
    IS_OLD: tl.constexpr,  # PDL: ids and weights were there before the kernel ahead started
    PDL: tl.constexpr = False,
):
    """Second product of one token and some columns, summed over its slots in their order.

    out = sum over slots of round((w2[expert] @ a dequantised + bias) * router weight)
    """
    wait_for_earlier(PDL and not IS_OLD)
    column_blocks = tl.cdiv(width, BLOCK_N)
    token = tl.program_id(0) // column_blocks
    first = tl.program_id(0) % column_blocks * BLOCK_N
    slot = tl.arange(0, SLOTS)
    contribution = token * TOP_K + slot
    found = local_expert(
        ids_ptr,
        map_ptr,
        contribution,
        (slot < TOP_K) & (contribution < num_contributions),
        TOP_K,
        num_experts,
        map_size,
        stride_it,
        stride_ik,
        HAS_MAP,
        False,
    )
    inside = tl.minimum(first + tl.arange(0, BLOCK_N), width - 1)
    expert = tl.maximum(found, 0).to(tl.int64)
    w_rows = w_ptr + (expert * stride_we)[:, None] + inside.to(tl.int64)[None, :] * stride_wn
    a_rows = a_ptr + contribution.to(tl.int64) * depth
    sums = row_sums(
        a_rows[:, None, None],
        w_rows[:, :, None],
        (found >= 0)[:, None, None],
        depth,
        INTEGER,
        DOT4,
        PACKED,
        TENSOR_CORES,
        BLOCK_K,
        EVEN_K,
        PDL,
    )
    a_scale = row_scales(a_scale_ptr, tl.where(found >= 0, contribution, 0), INTEGER, HAS_ROW_SCALE)
    if INTEGER:
        # One value for all rows gets their shape, too.
        a_scale = a_scale + tl.zeros((SLOTS, 1), tl.float32)
        a_scale = tl.reshape(tl.broadcast_to(a_scale, (SLOTS, BLOCK_N)), (1, SLOTS * BLOCK_N))
    # From here on one row of K * BN elements: the epilogue takes one.
    element = tl.arange(0, SLOTS * BLOCK_N)
    slot = element // BLOCK_N
    column = first + element % BLOCK_N
    contribution = token * TOP_K + slot
    expert = tl.reshape(tl.broadcast_to(expert[:, None], (SLOTS, BLOCK_N)), (SLOTS * BLOCK_N,))
    is_live = tl.reshape(
        tl.broadcast_to((found >= 0)[:, None], (SLOTS, BLOCK_N)), (SLOTS * BLOCK_N,)
    )
    value = weighted_value(
        tl.reshape(sums, (1, SLOTS * BLOCK_N)),
        a_scale,
        w_scale_ptr,
        bias_ptr,
        weights_ptr,
        expert,
        contribution,
        tl.minimum(column, width - 1),
        width,
        TOP_K,
        stride_rt,
        stride_rk,
        HAS_BIAS,
        False,
        INTEGER,
        SCALE_COLUMNS,
    )
    weight_ptrs = weights_ptr + token.to(tl.int64) * stride_rt + slot * stride_rk
    weight = tl.load(weight_ptrs, mask=is_live, other=0.0)
    value = value * weight.to(tl.float32)[None, :]
    part = value.to(out_ptr.dtype.element_ty).to(tl.float32)
    part = tl.reshape(tl.where(is_live[None, :], part, 0.0), (SLOTS, BLOCK_N))
    total = sum_of_slots(part, TOP_K, SLOTS, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)
    out_row = out_ptr + token.to(tl.int64) * width
    tl.store(out_row + column, total.to(out_ptr.dtype.element_ty), mask=column < width)
