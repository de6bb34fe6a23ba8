"""Multiply and store the pieces of stream_tiles.py, with all other kernels' epilogues (Gluon).

T tokens, H hidden, I intermediate, E local experts, K experts per token; SIZES as in start_ring.
Pointers come in tuples as stream_kernel names them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .dependent_launch import let_next_start, wait_for_earlier
from .fused_tiles import rounded
from .stream_tiles import (
    PANEL,
    PIECES_AHEAD,
    STORED_AHEAD,
    barrier,
    next_of,
    read_note,
    write_note,
)
from .tile_epilogues import (
    column_values,
    dequantize,
    gate_columns,
    gated,
    router_weights,
    row_scales,
)
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
def give_back(ring, at, STAGES: gl.constexpr):
    """Give back the buffers of the step before the one that is due, read by all warps."""
    _descriptors, _a_buffers, _w_buffers, _full, empty = ring
    slot, _phase = at
    barrier()
    mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)


@gluon.jit
def add_step(ring, at, sums, SIZES: gl.constexpr, PANELS: gl.constexpr, IS_FIRST: gl.constexpr):
    """Begin to add the products of one depth step, and give back the buffers of the one before."""
    STAGES: gl.constexpr = SIZES[1]
    BOXES: gl.constexpr = SIZES[2]
    ROW_BOXES: gl.constexpr = SIZES[2] // SIZES[3]
    _descriptors, a_buffers, w_buffers, full, _empty = ring
    slot, phase = at
    one, two = sums
    mbarrier.wait(full.index(slot), phase)
    for box in gl.static_range(BOXES):
        rows = a_buffers.index(slot * ROW_BOXES + box // PANELS).permute((1, 0))
        codes = w_buffers.index(slot * BOXES + box)
        use_acc = not IS_FIRST or box >= PANELS
        if PANELS == 2 and box % 2 == 1:
            two = warpgroup_mma(codes, rows, two, use_acc=use_acc, is_async=True)
        else:
            one = warpgroup_mma(codes, rows, one, use_acc=use_acc, is_async=True)
    if not IS_FIRST:
        # For these warps; others may still read.
        one, two = warpgroup_mma_wait(num_outstanding=BOXES, deps=(one, two))
        one, two = warpgroup_mma_init(one), warpgroup_mma_init(two)
        give_back(ring, at, STAGES)
    return (one, two), next_of(slot, phase, STAGES)


@gluon.jit
def begin_sums(ring, at, SIZES: gl.constexpr, PANELS: gl.constexpr, num_warps: gl.constexpr):
    """Begin a piece's int32 sums with its first step; returns them and the step due then.

    By itself, for it need not read zeros, and as rows that were waited for are there then.
    """
    ROWS: gl.constexpr = SIZES[0]
    layout: gl.constexpr = sums_layout(ROWS, num_warps)
    one = warpgroup_mma_init(gl.zeros((PANEL, ROWS), gl.int32, layout))
    two = warpgroup_mma_init(gl.zeros((PANEL, ROWS), gl.int32, layout))
    return add_step(ring, at, (one, two), SIZES, PANELS, True)


@gluon.jit
def end_sums(ring, at, sums, steps, SIZES: gl.constexpr, PANELS: gl.constexpr):
    """Return a piece's sums [ROWS, 64] of one or two panels, and the step due then."""
    for _ in range(1, steps):
        sums, at = add_step(ring, at, sums, SIZES, PANELS, False)
    one, two = sums
    one, two = warpgroup_mma_wait(num_outstanding=0, deps=(one, two))
    give_back(ring, at, SIZES[1])
    return one.permute((1, 0)), two.permute((1, 0)), at


@gluon.jit
def store_panel(out_ptr, row, is_row, value, panel, width, num_warps: gl.constexpr):
    """Store [ROWS, 64] values in some rows [ROWS] of a matrix of so many columns."""
    layout: gl.constexpr = store_layout(num_warps)
    column = panel * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    at = row.to(gl.int64)[:, None] * width + column[None, :]
    is_inside = is_row[:, None] & (column < width)[None, :]
    gl.store(out_ptr + at, gl.convert_layout(value, layout), mask=is_inside)


@gluon.jit
def first_piece(
    rows,  # pointers: intermediate, codes, their scales
    weight,  # pointers: scales of the rows of tokens, of the weight, bias
    ring,
    piece,
    at,
    steps,
    width,
    SIZES: gl.constexpr,
    GATE: gl.constexpr,  # constants: alpha, beta, limit, activation, whether there is a limit
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_STATIC: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute and store a piece of the first product: the result, or codes by a given scale."""
    ROWS: gl.constexpr = SIZES[0]
    middle_ptr, codes_ptr, code_scale_ptr = rows
    a_scale_ptr, w_scale_ptr, bias_ptr = weight
    _kind, _tile, expert, first, end, block = piece
    layout: gl.constexpr = sums_like(ROWS, num_warps).type.layout
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = block * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    column = gl.minimum(column, width - 1)
    expert = expert.to(gl.int64)
    columns = gate_columns(
        w_scale_ptr, bias_ptr, expert, column, width, True, HAS_BIAS, SCALE_COLUMNS
    )
    a_scale = row_scales(a_scale_ptr, gl.minimum(row, end - 1), True, HAS_ROW_SCALE)
    sums, at = begin_sums(ring, at, SIZES, 2, num_warps)
    one, two, at = end_sums(ring, at, sums, steps, SIZES, 2)
    value = gated(
        one,
        two,
        a_scale,
        columns,
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
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout(num_warps)))
    if IS_STATIC:
        scale = gl.load(code_scale_ptr) + gl.zeros((ROWS, 1), gl.float32, layout)
        codes = encode(value.to(gl.float32), scale)
        store_panel(codes_ptr, position, position < end, codes, block, width, num_warps)
    else:
        store_panel(middle_ptr, position, position < end, value, block, width, num_warps)
    return at


@gluon.jit
def second_panel(
    out_ptr,
    sums,
    a_scale,
    columns,  # of column_values
    router,  # router weights, or anything
    row,  # [ROWS] where they go, as they are stored
    is_row,
    panel,
    width,
    HAS_BIAS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Weight and store one panel of the second product."""
    value = dequantize(sums, a_scale, columns[0], columns[1], True, HAS_BIAS)
    if HAS_ROUTER_WEIGHT:
        value *= router
    value = value.to(out_ptr.dtype.element_ty)
    store_panel(out_ptr, row, is_row, value, panel, width, num_warps)


@gluon.jit
def second_piece(
    out_ptr,
    weight,  # pointers: scales of the rows, of the weight, bias
    routed,  # router weights, their strides, order; K is a constant
    ring,
    piece,
    at,
    steps,
    width,
    SIZES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    IS_STATIC: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute and store a piece of the second product, by contribution."""
    ROWS: gl.constexpr = SIZES[0]
    PANELS: gl.constexpr = SIZES[3]
    a_scale_ptr, w_scale_ptr, bias_ptr = weight
    weights_ptr, stride_rt, stride_rk, order_ptr, top_k = routed
    _kind, _tile, expert, first, end, block = piece
    layout: gl.constexpr = sums_like(ROWS, num_warps).type.layout
    row = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), end - 1)
    contribution = gl.load(order_ptr + row)
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, store_layout(num_warps)))
    written = gl.load(order_ptr + gl.minimum(position, end - 1))
    panel = block * PANELS
    column = panel * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    column = gl.minimum(column, width - 1)
    expert = expert.to(gl.int64)
    columns = column_values(
        w_scale_ptr, bias_ptr, expert, column, width, 1, 0, HAS_BIAS, SCALE_COLUMNS
    )
    others = columns
    if PANELS == 2:
        column = gl.minimum(column + PANEL, width - 1)
        others = column_values(
            w_scale_ptr, bias_ptr, expert, column, width, 1, 0, HAS_BIAS, SCALE_COLUMNS
        )
    router = columns[0]
    if HAS_ROUTER_WEIGHT:
        router = router_weights(weights_ptr, contribution, top_k, stride_rt, stride_rk)
    sums, at = begin_sums(ring, at, SIZES, PANELS, num_warps)
    # The rows are there, and so are their scales.
    a_scale = row_scales(a_scale_ptr, row, True, not IS_STATIC)
    one, two, at = end_sums(ring, at, sums, steps, SIZES, PANELS)
    for turn in gl.static_range(PANELS):
        second_panel(
            out_ptr,
            one if turn == 0 else two,
            a_scale,
            columns if turn == 0 else others,
            router,
            written,
            position < end,
            panel + turn,
            width,
            HAS_BIAS,
            HAS_ROUTER_WEIGHT,
            num_warps,
        )
    return at


@gluon.jit
def compute_pieces(
    out_ptr,
    rows,
    first_weight,
    second_weight,
    routed,
    ring,
    pieces,
    stored,
    steps,
    widths,
    SIZES: gl.constexpr,
    GATE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    UP_SCALE_COLUMNS: gl.constexpr,
    DOWN_SCALE_COLUMNS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_STATIC: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Multiply and store the pieces that notes tell of, and tell of those stored: all its warps."""
    wait_for_earlier(PDL)
    let_next_start(PDL)
    at, stored_at = (0, 0), (0, 0)
    piece, piece_at = read_note(pieces, (0, 0), PIECES_AHEAD, num_warps)
    while piece[0] >= 0:
        if piece[0] == 1:
            at = first_piece(
                rows,
                first_weight,
                ring,
                piece,
                at,
                steps[0],
                widths[0],
                SIZES,
                GATE,
                HAS_BIAS,
                HAS_ROW_SCALE,
                UP_SCALE_COLUMNS,
                DTYPE,
                IS_STATIC,
                num_warps,
            )
            stored_at = write_note(stored, stored_at, piece, STORED_AHEAD, num_warps)
        else:
            at = second_piece(
                out_ptr,
                second_weight,
                routed,
                ring,
                piece,
                at,
                steps[1],
                widths[1],
                SIZES,
                HAS_BIAS,
                HAS_ROUTER_WEIGHT,
                DOWN_SCALE_COLUMNS,
                IS_STATIC,
                num_warps,
            )
        piece, piece_at = read_note(pieces, piece_at, PIECES_AHEAD, num_warps)
    write_note(stored, stored_at, piece, STORED_AHEAD, num_warps)
