"""The sums of one tile of a grouped product, loaded in three ways; fused_rows.py calls these.

T tokens, H hidden, I intermediate, E local experts, K experts per token; positions as in
tile_products.py. Rows and weights come by pointers or by tensor descriptors (TMA): LOADS is
"pointers", "weights" (only those by descriptor) or "both", where activations lie in expert order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_products import multiply_add, products, weight_rows


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
