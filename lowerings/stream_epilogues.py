"""What becomes of the sums of stream_pieces.py, by parts of a tile's rows (Gluon, Hopper).

T tokens, H hidden, I intermediate, E local experts, K experts per token; pieces and SIZES as in
stream_tiles.py. What is read is read before a piece's products, what is computed comes after them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fused_tiles import rounded
from .stream_tiles import PANEL, part_rows
from .tile_epilogues import dequantize, gated, router_weights, row_scales
from .tile_math import encode


@gluon.constexpr_function
def sums_layout(rows, warps):
    """Return how sums [64 weights, rows] lie in registers."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 32])


@gluon.constexpr_function
def store_layout(warps):
    """Return how [rows, 64] values are stored: eight a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def sums_like(ROWS: gl.constexpr, num_warps: gl.constexpr):
    """Return zeros as a panel's sums lie, [ROWS, 64]."""
    return gl.zeros((PANEL, ROWS), gl.int32, sums_layout(ROWS, num_warps)).permute((1, 0))


@gluon.jit
def columns_of(panel, width, ROWS: gl.constexpr, num_warps: gl.constexpr):
    """Return the columns of a panel as sums of so many rows lie, the last for those past it."""
    layout: gl.constexpr = sums_like(ROWS, num_warps).type.layout
    column = panel * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    return gl.minimum(column, width - 1)


@gluon.jit
def as_part(value, ROWS: gl.constexpr, num_warps: gl.constexpr):
    """Return values of columns, [1, 64], as sums of so many rows lie: in the same threads."""
    layout: gl.constexpr = sums_like(ROWS, num_warps).type.layout
    return gl.convert_layout(value, layout, assert_trivial=True)


@gluon.jit
def first_of(piece, SIZES: gl.constexpr, PART: gl.constexpr):
    """Return the position of a part's first row."""
    return piece[3] + PART * part_rows(SIZES[0], 0)


@gluon.jit
def rows_of(piece, SIZES: gl.constexpr, PART: gl.constexpr, num_warps: gl.constexpr):
    """Return the positions of a part's rows as its sums lie, the last one's for those past it."""
    ROWS: gl.constexpr = part_rows(SIZES[0], PART)
    layout: gl.constexpr = gl.SliceLayout(1, sums_like(ROWS, num_warps).type.layout)
    return gl.minimum(first_of(piece, SIZES, PART) + gl.arange(0, ROWS, layout), piece[4] - 1)


@gluon.jit
def stored_rows_of(piece, SIZES: gl.constexpr, PART: gl.constexpr, num_warps: gl.constexpr):
    """Return the positions of a part's rows as they are stored, and which there are."""
    ROWS: gl.constexpr = part_rows(SIZES[0], PART)
    layout: gl.constexpr = gl.SliceLayout(1, store_layout(num_warps))
    position = first_of(piece, SIZES, PART) + gl.arange(0, ROWS, layout)
    return position, position < piece[4]


@gluon.jit
def store_panel(
    out_ptr, row, is_row, value, panel, width, POLICY: gl.constexpr, num_warps: gl.constexpr
):
    """Store [rows, 64] values in some rows [rows] of a matrix of so many columns."""
    layout: gl.constexpr = store_layout(num_warps)
    column = panel * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    at = row.to(gl.int64)[:, None] * width + column[None, :]
    is_inside = is_row[:, None] & (column < width)[None, :]
    value = gl.convert_layout(value, layout)
    gl.store(out_ptr + at, value, mask=is_inside, eviction_policy=POLICY)


@gluon.jit
def scales_of(
    a_scale_ptr,
    piece,
    SIZES: gl.constexpr,
    PART: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Return the scales of a part's rows as its sums lie, or one for all."""
    return row_scales(a_scale_ptr, rows_of(piece, SIZES, PART, num_warps), True, HAS_ROW_SCALE)


@gluon.jit
def store_first(
    rows,  # pointers: intermediate, codes, their scales
    sums,  # of gate and up
    a_scale,
    columns,  # of gate_columns
    piece,
    width,
    SIZES: gl.constexpr,
    PART: gl.constexpr,
    GATE: gl.constexpr,  # constants: alpha, beta, limit, activation, whether there is a limit
    HAS_BIAS: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_STATIC: gl.constexpr,
    POLICY: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Store a part's rows of the first product: the result, or codes by a given scale."""
    middle_ptr, codes_ptr, code_scale_ptr = rows
    ROWS: gl.constexpr = part_rows(SIZES[0], PART)
    here = (
        as_part(columns[0], ROWS, num_warps),
        as_part(columns[1], ROWS, num_warps),
        as_part(columns[2], ROWS, num_warps),
        as_part(columns[3], ROWS, num_warps),
    )
    value = gated(
        sums[0],
        sums[1],
        a_scale,
        here,
        GATE[0],
        GATE[1],
        GATE[2],
        GATE[3],
        True,
        HAS_BIAS,
        GATE[4],
        True,
    )
    value = rounded(value, DTYPE)
    position, is_row = stored_rows_of(piece, SIZES, PART, num_warps)
    if IS_STATIC:
        layout: gl.constexpr = sums_like(ROWS, num_warps).type.layout
        scale = gl.load(code_scale_ptr) + gl.zeros((ROWS, 1), gl.float32, layout)
        codes = encode(value.to(gl.float32), scale)
        store_panel(codes_ptr, position, is_row, codes, piece[5], width, POLICY, num_warps)
    else:
        store_panel(middle_ptr, position, is_row, value, piece[5], width, POLICY, num_warps)


@gluon.jit
def second_operands(
    routed,  # router weights, their strides, order; K is a constant
    piece,
    SIZES: gl.constexpr,
    PART: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Return a part's router weights, or anything, and its contributions as they are stored."""
    weights_ptr, stride_rt, stride_rk, order_ptr, top_k = routed
    row = rows_of(piece, SIZES, PART, num_warps)
    router = row
    if HAS_ROUTER_WEIGHT:
        contribution = gl.load(order_ptr + row)
        router = router_weights(weights_ptr, contribution, top_k, stride_rt, stride_rk)
    position, _is_row = stored_rows_of(piece, SIZES, PART, num_warps)
    return router, gl.load(order_ptr + gl.minimum(position, piece[4] - 1))


@gluon.jit
def store_second(
    out_ptr,
    sums,  # of one panel
    a_scale,
    columns,  # of column_values
    operands,  # of second_operands
    piece,
    panel,
    width,
    SIZES: gl.constexpr,
    PART: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    POLICY: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Weight and store a part's rows of one panel of the second product."""
    ROWS: gl.constexpr = part_rows(SIZES[0], PART)
    router, written = operands
    scale = as_part(columns[0], ROWS, num_warps)
    bias = as_part(columns[1], ROWS, num_warps)
    value = dequantize(sums, a_scale, scale, bias, True, HAS_BIAS)
    if HAS_ROUTER_WEIGHT:
        value *= router
    value = value.to(out_ptr.dtype.element_ty)
    _position, is_row = stored_rows_of(piece, SIZES, PART, num_warps)
    store_panel(out_ptr, written, is_row, value, panel, width, POLICY, num_warps)
