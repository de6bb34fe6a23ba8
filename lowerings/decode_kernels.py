"""A layer for few contributions in two or three launches: no routing, no tile of tokens.

T tokens, H hidden, I intermediate, E local experts, K experts per token. A program takes whole
rows of an expert's weights and one contribution, or all slots of one token. Codes come as words
of four, of which dp4a multiplies and adds a pair in one instruction; sums of codes are exact, and
the epilogues are those of tile_products.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fused_tiles import rounded
from .routing_kernels import local_expert
from .tile_math import encode, magnitude_bits, scale_of
from .tile_products import gated_value, row_scales, split_panels, weight_rows, weighted_value


@triton.jit
def word_pointer(ptr: tl.tensor) -> tl.tensor:
    """Return pointers to codes as pointers to words of four."""
    return ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def word_products(a: tl.tensor, w: tl.tensor, DOT4: tl.constexpr) -> tl.tensor:
    """Return the int32 sums of products of the four codes in each pair of words."""
    if DOT4:
        return tl.inline_asm_elementwise(
            asm="dp4a.s32.s32 $0, $1, $2, 0;",
            constraints="=r,r,r",
            args=[a, w],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        total = ((a << 24) >> 24) * ((w << 24) >> 24)
        total += ((a << 16) >> 24) * ((w << 16) >> 24)
        total += ((a << 8) >> 24) * ((w << 8) >> 24)
        return total + (a >> 24) * (w >> 24)


@triton.jit
def packed_words(codes: tl.tensor, ROWS: tl.constexpr, WORDS: tl.constexpr) -> tl.tensor:
    """Return int8 codes [ROWS, 4 * WORDS] as words [ROWS, WORDS]."""
    by_byte = tl.reshape(codes, (ROWS, WORDS, 4)).to(tl.int32) & 255
    shift = 8 * tl.arange(0, 4)
    return tl.sum(by_byte << shift[None, None, :], axis=2)


@triton.jit
def decode_up_kernel(
    out_ptr,  # [T*K, I] by contribution, in the result dtype, or codes if IS_STATIC
    code_scale_ptr,  # IS_STATIC: one value
    a_ptr,  # [T, H] codes, contiguous
    a_scale_ptr,  # [T] fp32, or one value
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
    DOT4: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row
):
    """First product of one contribution and some rows of its expert's weights.

    h = dequantize(w13[expert] @ a[token]) + bias; out = round(f(h[:I]) * (h[I:] + beta))
    """
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
        word = tl.arange(0, BLOCK_K // 4)[None, :]
        is_inside = word < depth // 4
        rows = weight_rows(
            w_ptr, expert, first, width, stride_we, stride_wn, up_offset, GATED, BLOCK_N
        )
        w_words = word_pointer(rows)[:, None] + word
        w = tl.load(w_words, mask=is_inside, other=0, eviction_policy="evict_first")
        token = contribution // top_k
        a_words = word_pointer(a_ptr + token.to(tl.int64) * depth) + word
        a = tl.load(a_words, mask=is_inside, other=0)
        sums = tl.sum(word_products(a, w, DOT4), axis=1)[None, :]
        gate, up = split_panels(sums, GATED, 1, BLOCK_N)
        column = first + tl.arange(0, BLOCK_N)
        value = gated_value(
            gate,
            up,
            row_scales(a_scale_ptr, token + tl.arange(0, 1), True, HAS_ROW_SCALE),
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
            True,
            SCALE_COLUMNS,
        )
        value = rounded(value, DTYPE)
        if IS_STATIC:
            scale = tl.load(code_scale_ptr) + tl.zeros((1, 1), tl.float32)
            value = encode(value.to(tl.float32), scale)
        out_ptrs = out_ptr + contribution.to(tl.int64) * width + column[None, :]
        tl.store(out_ptrs, value, mask=(column < width)[None, :])


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
    a_ptr,  # [T*K, I] by contribution: codes, or floats if IS_QUANTIZED_HERE
    a_scale_ptr,  # [T*K] fp32, or one value; None if IS_QUANTIZED_HERE
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
    IS_QUANTIZED_HERE: tl.constexpr,  # by a scale for each row
    SCALE_COLUMNS: tl.constexpr,
    DOT4: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # K, or the next power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a whole row
):
    """Second product of one token and some columns, summed over its slots in their order.

    out = sum over slots of round((w2[expert] @ a dequantised + bias) * router weight)
    """
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
    # Weights of all slots first: they are under way while the rows are quantised.
    word = tl.arange(0, BLOCK_K // 4)
    inside = tl.minimum(first + tl.arange(0, BLOCK_N), width - 1)
    expert = tl.maximum(found, 0).to(tl.int64)
    word_mask = (found >= 0)[:, None] & (word < depth // 4)[None, :]
    w_rows = w_ptr + (expert * stride_we)[:, None] + inside.to(tl.int64)[None, :] * stride_wn
    w_words = word_pointer(w_rows)[:, :, None] + word[None, None, :]
    w = tl.load(w_words, mask=word_mask[:, None, :], other=0, eviction_policy="evict_first")
    a_rows = a_ptr + contribution.to(tl.int64)[:, None] * depth
    if IS_QUANTIZED_HERE:
        k = tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(a_rows + k, mask=(found >= 0)[:, None] & (k < depth), other=0.0)
        x = x.to(tl.float32)
        a_scale = scale_of(tl.max(magnitude_bits(x), axis=1))[:, None]
        a = packed_words(encode(x, a_scale), SLOTS, BLOCK_K // 4)
    else:
        a = tl.load(word_pointer(a_rows) + word[None, :], mask=word_mask, other=0)
        live = tl.where(found >= 0, contribution, 0)
        a_scale = row_scales(a_scale_ptr, live, True, HAS_ROW_SCALE) + tl.zeros(
            (SLOTS, 1), tl.float32
        )
    sums = tl.sum(word_products(a[:, None, :], w, DOT4), axis=2)  # [K, BN]
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
        tl.reshape(tl.broadcast_to(a_scale, (SLOTS, BLOCK_N)), (1, SLOTS * BLOCK_N)),
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
        True,
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
