"""A layer for few contributions in two launches: no routing, rows quantised where they are read.

T tokens, H hidden, I intermediate, E local experts, K experts per token. A program takes whole
rows of a weight, so that nothing is padded to a tile of tokens; sums of codes are exact, and the
epilogues are those of tile_products.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .routing_kernels import local_expert
from .tile_math import encode, magnitude_bits, scale_of
from .tile_products import gated_value, weighted_value


@triton.jit
def quantized_row(
    x_ptrs,  # [R, BLOCK]
    is_inside,  # [R, BLOCK]
    scale_ptr,
    QUANT: tl.constexpr,  # "token", "static" or "none"
):
    """Return rows [R, BLOCK] as codes or floats, and their scales [R, 1] or 1."""
    x = tl.load(x_ptrs, mask=is_inside, other=0.0)
    if QUANT == "none":
        return x, 1.0
    else:
        wide = x.to(tl.float32)
        if QUANT == "token":
            scale = scale_of(tl.max(magnitude_bits(wide), axis=1))[:, None]
        else:
            scale = tl.load(scale_ptr) + tl.zeros((x.shape[0], 1), tl.float32)
        return encode(wide, scale), scale


@triton.jit
def row_sums(
    a: tl.tensor,  # codes, or floats for weight-only experts
    w: tl.tensor,  # codes
    AXIS: tl.constexpr,
    INTEGER: tl.constexpr,
) -> tl.tensor:
    """Return the sums of a * w along the depth: exact in int32, or in fp32."""
    if INTEGER:
        return tl.sum(a.to(tl.int32) * w.to(tl.int32), axis=AXIS)
    else:
        return tl.sum(a.to(tl.float32) * w.to(tl.float32), axis=AXIS)


@triton.jit
def decode_up_kernel(
    out_ptr,  # [T*K, I] by contribution
    x_ptr,
    a_scale_ptr,  # "static": fp32 scale
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
    stride_xm,
    stride_xk,
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
    QUANT: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row
):
    """First product of one contribution and some rows of its expert's weights.

    h = dequantize(w13[expert] @ quantize(x[token])) + bias; out = round(f(h[:I]) * (h[I:] + beta))
    """
    INTEGER: tl.constexpr = QUANT != "none"
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
        column = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.minimum(column, width - 1)
        k = tl.arange(0, BLOCK_K)
        k_mask = (k < depth)[None, :]
        w_row = w_ptr + expert * stride_we + inside.to(tl.int64) * stride_wn
        w_ptrs = w_row[:, None] + k[None, :]  # [BN, BK]
        # Weights first: they are under way while the row is quantised.
        gate_w = tl.load(w_ptrs, mask=k_mask, other=0)
        up_w = gate_w
        if GATED:
            up_w = tl.load(w_ptrs + up_offset, mask=k_mask, other=0)
        x_row = x_ptr + (contribution // top_k).to(tl.int64) * stride_xm
        x_ptrs = x_row + k.to(tl.int64)[None, :] * stride_xk
        a, a_scale = quantized_row(x_ptrs, k_mask, a_scale_ptr, QUANT)
        gate = row_sums(a, gate_w, 1, INTEGER)[None, :]
        up = gate
        if GATED:
            up = row_sums(a, up_w, 1, INTEGER)[None, :]
        value = gated_value(
            gate,
            up,
            a_scale,
            w_scale_ptr,
            bias_ptr,
            expert,
            inside,
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
        out_ptrs = out_ptr + contribution.to(tl.int64) * width + column[None, :]
        mask = (column < width)[None, :]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=mask)


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
    a_ptr,  # [T*K, I] by contribution: floats, or codes for "given" and "given-one"
    a_scale_ptr,  # "given": [T*K] fp32; "static" and "given-one": one value
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
    QUANT: tl.constexpr,  # as above, or "given", "given-one": quantised before
    SCALE_COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # K, or the next power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row
):
    """Second product of one token and some columns, summed over its slots in their order.

    out = sum over slots of round((w2[expert] @ a dequantised + bias) * router weight)
    """
    INTEGER: tl.constexpr = QUANT != "none"
    column_blocks = tl.cdiv(width, BLOCK_N)
    token = tl.program_id(0) // column_blocks
    first = tl.program_id(0) % column_blocks * BLOCK_N
    k = tl.arange(0, BLOCK_K)
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
    # Weights of all slots first: they are under way while the rows are quantised.
    inside = tl.minimum(first + tl.arange(0, BLOCK_N), width - 1)
    expert = tl.maximum(found, 0).to(tl.int64)
    row_mask = (found >= 0)[:, None] & (k < depth)[None, :]
    w_rows = w_ptr + (expert * stride_we)[:, None] + inside.to(tl.int64)[None, :] * stride_wn
    w = tl.load(w_rows[:, :, None] + k[None, None, :], mask=row_mask[:, None, :], other=0)
    a_ptrs = a_ptr + contribution.to(tl.int64)[:, None] * depth + k[None, :]
    if QUANT == "given":
        a = tl.load(a_ptrs, mask=row_mask, other=0)
        a_scale = tl.load(a_scale_ptr + contribution, mask=found >= 0, other=1.0)[:, None]
    elif QUANT == "given-one":
        a = tl.load(a_ptrs, mask=row_mask, other=0)
        a_scale = tl.load(a_scale_ptr) + tl.zeros((SLOTS, 1), tl.float32)
    else:
        a, a_scale = quantized_row(a_ptrs, row_mask, a_scale_ptr, QUANT)
    sums = row_sums(a[:, None, :], w, 2, INTEGER)  # [K, BN]
    # From here on one row of K * BN elements: the epilogue takes one.
    element = tl.arange(0, SLOTS * BLOCK_N)
    slot = element // BLOCK_N
    column = first + element % BLOCK_N
    contribution = token * TOP_K + slot
    expert = tl.reshape(tl.broadcast_to(expert[:, None], (SLOTS, BLOCK_N)), (SLOTS * BLOCK_N,))
    is_live = tl.reshape(
        tl.broadcast_to((found >= 0)[:, None], (SLOTS, BLOCK_N)), (SLOTS * BLOCK_N,)
    )
    if INTEGER:
        a_scale = tl.reshape(tl.broadcast_to(a_scale, (SLOTS, BLOCK_N)), (1, SLOTS * BLOCK_N))
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
