"""What a tile of asynchronous products needs beside its sums, and how it is stored (Gluon, Hopper).

I intermediate, E local experts, K experts per token; BM, BN block sizes. The operands are read
before the products: while data stream, reading takes a microsecond or two. The arithmetic is that
of all other kernels (tile_epilogues.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fused_tiles import rounded
from .tile_epilogues import (
    column_values,
    dequantize,
    gate_columns,
    gated,
    router_weights,
    row_scales,
)
from .tile_math import encode
from .tile_products import split_panels
from .wgmma_tiles import ended_sums, product_layout


@gluon.constexpr_function
def store_layout(computed, dtype, rows, columns, warps):
    """Return how a tile is stored: eight values a thread, its rows still with their warps.

    As the products leave them, two a thread, bf16 took 250 us instead of 169 (second product of
    Qwen3-30B-A3B, 4096 tokens). Two of fp32 fill sectors, and more would not fit beside the codes.
    """
    if dtype.primitive_bitwidth == 32:
        return computed
    lanes, groups = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]], [[16, 0], [32, 0]]
    registers, row, column = [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]], 64, 64
    if warps == 8 and rows >= 128:
        groups.append([64, 0])
        row = 128
    elif warps == 8:
        groups.append([0, 64])
        column = 128
    while column < columns:
        registers.append([0, column])
        column *= 2
    while row < rows:
        registers.append([row, 0])
        row *= 2
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [rows, columns])


@gluon.jit
def tile_columns(
    column_block, width, EVEN_N: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr
):
    """Return a tile's columns [BN]; those past the end repeat the last one."""
    column = column_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    # Known to be in a row they are read two at a time.
    return column if EVEN_N else gl.minimum(column, width - 1)


@gluon.jit
def panel_zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr, GATED: gl.constexpr, num_warps):
    """Return zeros as the sums of gate or up lie."""
    sums = gl.zeros((ROWS, COLUMNS), gl.int32, product_layout(ROWS, COLUMNS, num_warps))
    gate, _up = split_panels(sums, GATED, ROWS, COLUMNS // 2 if GATED else COLUMNS)
    return gate


@gluon.jit
def up_operands(
    a_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    place,
    width,
    PANELS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    EVEN_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Read what one tile of the first product needs beside its sums: scales, biases."""
    expert, first, end, column_block = place
    like = panel_zeros(ROWS, PANELS * BLOCK_N, PANELS == 2, num_warps)
    layout: gl.constexpr = like.type.layout
    row = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), end - 1)
    columns = gate_columns(
        w_scale_ptr,
        bias_ptr,
        expert.to(gl.int64),
        tile_columns(column_block, width, EVEN_N, BLOCK_N, layout),
        width,
        PANELS == 2,
        HAS_BIAS,
        SCALE_COLUMNS,
    )
    return row_scales(a_scale_ptr, row, True, HAS_ROW_SCALE), columns


@gluon.jit
def store_up(
    out_ptr,
    code_scale_ptr,
    acc,
    operands,  # of up_operands
    place,
    width,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PANELS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_STATIC: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Gate and store one tile of the first product, by position."""
    GATED: gl.constexpr = PANELS == 2
    _expert, first, end, column_block = place
    a_scale, columns = operands
    gate, up = split_panels(ended_sums(acc), GATED, ROWS, BLOCK_N)
    value = gated(
        gate,
        up,
        a_scale,
        columns,
        ALPHA,
        BETA,
        LIMIT,
        ACTIVATION,
        GATED,
        HAS_BIAS,
        HAS_LIMIT,
        True,
    )
    value = rounded(value, DTYPE)
    layout: gl.constexpr = gate.type.layout
    if IS_STATIC:
        scale = gl.load(code_scale_ptr) + gl.zeros((ROWS, 1), gl.float32, layout)
        value = encode(value.to(gl.float32), scale)
    stored: gl.constexpr = store_layout(layout, value.dtype, ROWS, BLOCK_N, num_warps)
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    column = column_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    at = position.to(gl.int64)[:, None] * width + column[None, :]
    is_inside = (position < end)[:, None] & (column < width)[None, :]
    gl.store(out_ptr + at, gl.convert_layout(value, stored), mask=is_inside)


@gluon.jit
def down_operands(
    out_ptr,
    a_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    order_ptr,
    place,
    width,
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    EVEN_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Read what one tile of the second product needs beside its sums, all but router weights.

    Contributions twice: as the sums lie, and as they are stored.
    """
    expert, first, end, column_block = place
    layout: gl.constexpr = product_layout(ROWS, BLOCK_N, num_warps)
    row = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), end - 1)
    column = tile_columns(column_block, width, EVEN_N, BLOCK_N, layout)
    scale, bias = column_values(
        w_scale_ptr, bias_ptr, expert.to(gl.int64), column, width, 1, 0, HAS_BIAS, SCALE_COLUMNS
    )
    stored: gl.constexpr = store_layout(layout, out_ptr.dtype.element_ty, ROWS, BLOCK_N, num_warps)
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    written = gl.load(order_ptr + gl.minimum(position, end - 1))
    a_scale = row_scales(a_scale_ptr, row, True, HAS_ROW_SCALE)
    return a_scale, scale, bias, gl.load(order_ptr + row), written


@gluon.jit
def store_down(
    out_ptr,
    weights_ptr,
    acc,
    operands,  # of down_operands
    place,
    width,
    top_k,
    stride_rt,
    stride_rk,
    HAS_BIAS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Weight and store one tile of the second product, by contribution."""
    _expert, first, end, column_block = place
    a_scale, scale, bias, contribution, written = operands
    if HAS_ROUTER_WEIGHT:
        weight = router_weights(weights_ptr, contribution, top_k, stride_rt, stride_rk)
    value = dequantize(ended_sums(acc), a_scale, scale, bias, True, HAS_BIAS)
    if HAS_ROUTER_WEIGHT:
        value *= weight
    value = value.to(out_ptr.dtype.element_ty)
    stored: gl.constexpr = written.type.layout.parent
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    column = column_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    at = written.to(gl.int64)[:, None] * width + column[None, :]
    is_inside = (position < end)[:, None] & (column < width)[None, :]
    gl.store(out_ptr + at, gl.convert_layout(value, stored), mask=is_inside)
