"""The tile of each grouped product, once for eager kernels and templates: gather, sum, epilogue.

T tokens, H hidden, I intermediate, E local experts, K experts per token. A *contribution* is one
(token, slot) pair, numbered token * K + slot; a *position* is its place in expert order.

A sum of int8 products is exact, so no tile shape, order or split changes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_epilogues import gated_value, row_scales, weighted_value
from .tile_math import code_unit, codes_to_float


@triton.jit
def tile_of(pid, num_tiles, column_blocks, GROUP_M: tl.constexpr):
    """Return the tile and the column block of a program: GROUP_M tiles share columns in L2."""
    per_group = GROUP_M * column_blocks
    first = pid // per_group * GROUP_M
    size = tl.minimum(num_tiles - first, GROUP_M)
    within = pid % per_group
    return first + within % size, within // size


@triton.jit
def weight_rows(
    w_ptr,
    expert: tl.tensor,  # int64
    first,  # column of the tile
    width,
    stride_we,
    stride_wn,
    up_offset,  # elements from a gate row to its up row
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return pointers to the weight rows of a tile's columns: [BN], or [2 * BN] with up rows last.

    Columns past the end repeat the last one.
    """
    index = tl.arange(0, 2 * BLOCK_N if GATED else BLOCK_N)
    column = tl.minimum(first + index % BLOCK_N, width - 1)
    panel = (index // BLOCK_N).to(tl.int64)
    return w_ptr + expert * stride_we + column.to(tl.int64) * stride_wn + panel * up_offset


@triton.jit
def products(
    a_rows,  # [BM, 1] pointers to the first element of each row
    w_rows,  # [1, BN], or [1, 2 * BN]
    depth,
    stride_ak,
    GATED: tl.constexpr,
    INTEGER: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr = False,
):
    """Return a @ w.T over the whole depth, gate and up side by side in one product.

    INTEGER: int8 codes into one int32 accumulator, converted once afterwards. Otherwise weight
    codes are converted in the tile to the dtype of a, see codes_to_float for PACKED, and summed in
    fp32, without TF32; the power of two that codes then lack is given to the sums.
    """
    ACC: tl.constexpr = tl.int32 if INTEGER else tl.float32
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N if GATED else BLOCK_N), dtype=ACC)
    offsets = tl.arange(0, BLOCK_K)
    for start in range(0, depth, BLOCK_K):
        k = start + offsets
        a_ptrs = a_rows + k[None, :] * stride_ak  # [BM, BK]
        w_ptrs = w_rows + k[:, None]  # [BK, BN]
        if EVEN_K:
            a = tl.load(a_ptrs)
            w = tl.load(w_ptrs)
        else:
            k_mask = k < depth
            a = tl.load(a_ptrs, mask=k_mask[None, :], other=0)
            w = tl.load(w_ptrs, mask=k_mask[:, None], other=0)
        acc = multiply_add(a, w, acc, INTEGER, PACKED)
    if PACKED:
        acc *= code_unit(a_rows.dtype.scalar.element_ty, PACKED)
    return acc


@triton.jit
def split_panels(acc: tl.tensor, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the sums of gate and up, [BM, BN] each; registers of one thread hold both."""
    if GATED:
        panels = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N))
        return tl.split(tl.permute(panels, (0, 2, 1)))
    else:
        return acc, acc


@triton.jit
def multiply_add(
    a: tl.tensor,
    w: tl.tensor,
    acc: tl.tensor,
    INTEGER: tl.constexpr,
    PACKED: tl.constexpr = False,
) -> tl.tensor:
    """Return acc + a @ w, exact in int32 or summed in fp32."""
    if INTEGER:
        return tl.dot(a, w, acc, out_dtype=tl.int32)
    else:
        w = codes_to_float(w, a.dtype, PACKED)
        return tl.dot(a, w, acc, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def up_tile(
    a_ptr,
    a_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    order_ptr,
    tile_ptr,  # expert, first position, end position
    column_block,
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
    INTEGER: tl.constexpr,
    PACKED: tl.constexpr,  # not INTEGER: see codes_to_float
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,  # "channel", "tensor" or "halves"
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the activated intermediate of one tile and where it goes: value, position, column.

    h = dequantize(a[token] @ w13[expert].T) + bias; value = f(h[:I]) * (h[I:] + beta) in fp32.
    """
    expert = tl.load(tile_ptr).to(tl.int64)
    end = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    # Rows and columns past the end repeat the last one: no mask in the loop, nothing stored.
    contribution = tl.load(order_ptr + tl.minimum(position, end - 1))
    token = (contribution // top_k).to(tl.int64)
    first = column_block * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(
        w_ptr, expert, first, width, stride_we, stride_wn, up_offset, GATED, BLOCK_N
    )
    acc = products(
        (a_ptr + token * stride_am)[:, None],
        w_rows[None, :],
        depth,
        stride_ak,
        GATED,
        INTEGER,
        EVEN_K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PACKED,
    )
    gate, up = split_panels(acc, GATED, BLOCK_M, BLOCK_N)
    a_scale = row_scales(a_scale_ptr, token, INTEGER, HAS_ROW_SCALE)
    value = gated_value(
        gate,
        up,
        a_scale,
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
        INTEGER,
        SCALE_COLUMNS,
    )
    return value, position, column, position < end


@triton.jit
def down_tile(
    a_ptr,
    a_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tile_ptr,
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
    INTEGER: tl.constexpr,
    PACKED: tl.constexpr,  # not INTEGER: see codes_to_float
    HAS_ROW_SCALE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,  # "channel" or "tensor"
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return weighted contributions of one tile: value, contribution, column, whether real.

    value = (dequantize(a[position] @ w2[expert].T) + bias) * router weight, all in fp32.
    """
    expert = tl.load(tile_ptr).to(tl.int64)
    end = tl.load(tile_ptr + 2)
    position = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    row = tl.minimum(position, end - 1).to(tl.int64)
    contribution = tl.load(order_ptr + row)
    first = column_block * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    w_rows = weight_rows(w_ptr, expert, first, width, stride_we, stride_wn, 0, False, BLOCK_N)
    acc = products(
        (a_ptr + row * stride_am)[:, None],
        w_rows[None, :],
        depth,
        1,
        False,
        INTEGER,
        EVEN_K,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PACKED,
    )
    a_scale = row_scales(a_scale_ptr, row, INTEGER, HAS_ROW_SCALE)
    value = weighted_value(
        acc,
        a_scale,
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
        INTEGER,
        SCALE_COLUMNS,
    )
    return value, contribution, column, position < end
