"""Quantising rows in one read: tokens into expert order, and the intermediate.

T tokens, H hidden, I intermediate, K experts per token. Same codes as eager_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent_launch import let_next_start, wait_for_earlier
from .tile_math import encode, encode_by_maximum, magnitude_bits, scale_of


@triton.jit
def is_narrow(ptr) -> tl.constexpr:
    """Say whether a pointer is one to bf16 or fp16."""
    return tl.constexpr(ptr.dtype.element_ty.primitive_bitwidth == 16)


@triton.jit
def spread_kernel(
    codes_ptr,  # [T*K, columns] int8 by position
    scale_out_ptr,  # [T*K] fp32 for "token"; unused with a static scale
    x_ptr,
    given_ptr,  # "static": fp32 scale
    local_ptr,  # [T*K]
    inverse_ptr,  # [T*K] int32, contribution -> position
    num_rows,
    columns,
    stride_xr,
    stride_xc,
    QUANT: tl.constexpr,  # "token" or "static"
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # a whole row
    PDL: tl.constexpr = False,
):
    """Quantise every token once and store its codes at each of its positions.

    codes[inverse[token * K + slot]] = round(x[token] / scale)
    """
    # In this order: the next kernel reads the routing, and takes tickets of its progress, at once.
    wait_for_earlier(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_mask = row < num_rows
    is_inside = row_mask[:, None] & (column < columns)[None, :]
    x_ptrs = x_ptr + (row * stride_xr)[:, None] + column.to(tl.int64)[None, :] * stride_xc
    x = tl.load(x_ptrs, mask=is_inside, other=0.0).to(tl.float32)
    if QUANT == "token":
        scale = scale_of(tl.max(magnitude_bits(x), axis=1))[:, None]
        codes = encode_by_maximum(x, scale, is_narrow(x_ptr))
    else:
        scale = tl.load(given_ptr) + tl.zeros((ROWS, 1), tl.float32)
        codes = encode(x, scale)
    for slot in tl.static_range(TOP_K):
        contribution = row * TOP_K + slot
        is_live = tl.load(local_ptr + contribution, mask=row_mask, other=-1) >= 0
        position = tl.load(inverse_ptr + contribution, mask=is_live, other=0).to(tl.int64)
        if QUANT == "token":
            out_ptrs = scale_out_ptr + position[:, None]
            tl.store(out_ptrs, scale, mask=is_live[:, None])
        code_ptrs = codes_ptr + (position * columns)[:, None] + column[None, :]
        tl.store(code_ptrs, codes, mask=is_inside & is_live[:, None])


@triton.jit
def requantize_kernel(
    codes_ptr,  # [rows, columns] int8
    scale_out_ptr,  # [rows] fp32 for "token"
    x_ptr,  # [rows, columns], contiguous
    given_ptr,  # "static": fp32 scale
    live_ptr,  # HAS_LIVE: rows that count stand behind the first element
    num_rows,
    columns,
    QUANT: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # a whole row
    PDL: tl.constexpr = False,
):
    """Quantise the rows of the intermediate in one read: codes = round(x / scale)."""
    let_next_start(PDL)
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    if HAS_LIVE:
        row_mask = row < tl.load(live_ptr + 1)
    column = tl.arange(0, BLOCK)
    is_inside = row_mask[:, None] & (column < columns)[None, :]
    at = (row * columns)[:, None] + column[None, :]
    x = tl.load(x_ptr + at, mask=is_inside, other=0.0).to(tl.float32)
    if QUANT == "token":
        scale = scale_of(tl.max(magnitude_bits(x), axis=1))[:, None]
        tl.store(scale_out_ptr + row[:, None], scale, mask=row_mask[:, None])
        codes = encode_by_maximum(x, scale, is_narrow(x_ptr))
    else:
        scale = tl.load(given_ptr) + tl.zeros((ROWS, 1), tl.float32)
        codes = encode(x, scale)
    tl.store(codes_ptr + at, codes, mask=is_inside)
