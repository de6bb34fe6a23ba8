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
from .stream_epilogues import (
    columns_of,
    scales_of,
    second_operands,
    store_first,
    store_second,
    sums_layout,
)
from .stream_tiles import (
    PANEL,
    PIECES_AHEAD,
    STORED_AHEAD,
    barrier,
    has_rest,
    next_of,
    part_rows,
    parts_of,
    read_note,
    write_note,
)
from .tile_epilogues import column_values, gate_columns


@gluon.jit
def give_back(ring, at, STAGES: gl.constexpr):
    """Give back the buffers of the step before the one that is due, read by all warps."""
    _weights, _rows, _full, empty = ring
    slot, _phase = at
    barrier()
    mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)


@gluon.jit
def add_step(ring, at, sums, SIZES: gl.constexpr, PANELS: gl.constexpr, IS_FIRST: gl.constexpr):
    """Begin to add the products of one depth step, and give back the buffers of the one before.

    sums: of two panels, the second unused if PANELS is 1, of a tile's head, then of its rest.
    """
    BOXES: gl.constexpr = SIZES[2]
    ROW_BOXES: gl.constexpr = SIZES[2] // SIZES[3]
    PARTS: gl.constexpr = parts_of(SIZES[0])
    weights, ordered, full, _empty = ring
    _w1, _w2, w_buffers = weights
    _heads, _rests, head_buffers, rest_buffers = ordered
    slot, phase = at
    one, two = sums[0], sums[1]
    rest_one, rest_two = sums[2 * PARTS - 2], sums[2 * PARTS - 1]
    mbarrier.wait(full.index(slot), phase)
    for box in gl.static_range(BOXES):
        buffer = slot * ROW_BOXES + box // PANELS
        rows = head_buffers.index(buffer).permute((1, 0))
        rest = rest_buffers.index(buffer).permute((1, 0))
        codes = w_buffers.index(slot * BOXES + box)
        use_acc = not IS_FIRST or box >= PANELS
        if PANELS == 2 and box % 2 == 1:
            two = warpgroup_mma(codes, rows, two, use_acc=use_acc, is_async=True)
            if PARTS == 2:
                rest_two = warpgroup_mma(codes, rest, rest_two, use_acc=use_acc, is_async=True)
        else:
            one = warpgroup_mma(codes, rows, one, use_acc=use_acc, is_async=True)
            if PARTS == 2:
                rest_one = warpgroup_mma(codes, rest, rest_one, use_acc=use_acc, is_async=True)
    if not IS_FIRST:
        # For these warps; others may still read.
        if PARTS == 2:
            one, two, rest_one, rest_two = warpgroup_mma_wait(
                num_outstanding=2 * BOXES, deps=(one, two, rest_one, rest_two)
            )
            rest_one, rest_two = warpgroup_mma_init(rest_one), warpgroup_mma_init(rest_two)
        else:
            one, two = warpgroup_mma_wait(num_outstanding=BOXES, deps=(one, two))
        one, two = warpgroup_mma_init(one), warpgroup_mma_init(two)
        give_back(ring, at, SIZES[1])
    sums = (one, two, rest_one, rest_two) if PARTS == 2 else (one, two)
    return sums, next_of(slot, phase, SIZES[1])


@gluon.jit
def zeros_of(SIZES: gl.constexpr, PART: gl.constexpr, num_warps: gl.constexpr):
    """Return zeros for the sums of a panel of a part's rows."""
    ROWS: gl.constexpr = part_rows(SIZES[0], PART)
    return warpgroup_mma_init(gl.zeros((PANEL, ROWS), gl.int32, sums_layout(ROWS, num_warps)))


@gluon.jit
def begin_sums(ring, at, SIZES: gl.constexpr, PANELS: gl.constexpr, num_warps: gl.constexpr):
    """Begin a piece's int32 sums with its first step; returns them and the step due then.

    By itself, for it need not read zeros, and as rows that were waited for are there then.
    """
    one, two = zeros_of(SIZES, 0, num_warps), zeros_of(SIZES, 0, num_warps)
    if parts_of(SIZES[0]) == 2:
        rest_one, rest_two = zeros_of(SIZES, 1, num_warps), zeros_of(SIZES, 1, num_warps)
        return add_step(ring, at, (one, two, rest_one, rest_two), SIZES, PANELS, True)
    else:
        return add_step(ring, at, (one, two), SIZES, PANELS, True)


@gluon.jit
def end_sums(ring, at, sums, steps, SIZES: gl.constexpr, PANELS: gl.constexpr):
    """Return a piece's sums, [rows, 64] of two panels and of each part, and the step due then."""
    for _ in range(1, steps):
        sums, at = add_step(ring, at, sums, SIZES, PANELS, False)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=sums)
    give_back(ring, at, SIZES[1])
    one, two = sums[0].permute((1, 0)), sums[1].permute((1, 0))
    if parts_of(SIZES[0]) == 2:
        return (one, two, sums[2].permute((1, 0)), sums[3].permute((1, 0))), at
    else:
        return (one, two), at


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
    GATE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_STATIC: gl.constexpr,
    POLICY: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute and store a piece of the first product: the result, or codes by a given scale."""
    PARTS: gl.constexpr = parts_of(SIZES[0])
    a_scale_ptr, w_scale_ptr, bias_ptr = weight
    _kind, _tile, expert, _first, _end, block = piece
    column = columns_of(block, width, part_rows(SIZES[0], 0), num_warps)
    columns = gate_columns(
        w_scale_ptr, bias_ptr, expert.to(gl.int64), column, width, True, HAS_BIAS, SCALE_COLUMNS
    )
    scale = scales_of(a_scale_ptr, piece, SIZES, 0, HAS_ROW_SCALE, num_warps)
    rest_scale = scale
    if PARTS == 2:
        rest_scale = scales_of(a_scale_ptr, piece, SIZES, 1, HAS_ROW_SCALE, num_warps)
    sums, at = begin_sums(ring, at, SIZES, 2, num_warps)
    sums, at = end_sums(ring, at, sums, steps, SIZES, 2)
    for part in gl.static_range(PARTS):
        if (part == 0) or has_rest(piece, SIZES):
            store_first(
                rows,
                (sums[2 * part], sums[2 * part + 1]),
                scale if part == 0 else rest_scale,
                columns,
                piece,
                width,
                SIZES,
                part,
                GATE,
                HAS_BIAS,
                DTYPE,
                IS_STATIC,
                POLICY,
                num_warps,
            )
    return at


@gluon.jit
def second_piece(
    out_ptr,
    weight,  # pointers: scales of the rows, of the weight, bias
    routed,
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
    POLICY: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Compute and store a piece of the second product, by contribution."""
    PANELS: gl.constexpr = SIZES[3]
    PARTS: gl.constexpr = parts_of(SIZES[0])
    a_scale_ptr, w_scale_ptr, bias_ptr = weight
    _kind, _tile, expert, _first, _end, block = piece
    expert = expert.to(gl.int64)
    operands = second_operands(routed, piece, SIZES, 0, HAS_ROUTER_WEIGHT, num_warps)
    rest_operands = operands
    if PARTS == 2:
        rest_operands = second_operands(routed, piece, SIZES, 1, HAS_ROUTER_WEIGHT, num_warps)
    column = columns_of(block * PANELS, width, part_rows(SIZES[0], 0), num_warps)
    columns = column_values(
        w_scale_ptr, bias_ptr, expert, column, width, 1, 0, HAS_BIAS, SCALE_COLUMNS
    )
    next_columns = columns
    if PANELS == 2:
        column = gl.minimum(column + PANEL, width - 1)
        next_columns = column_values(
            w_scale_ptr, bias_ptr, expert, column, width, 1, 0, HAS_BIAS, SCALE_COLUMNS
        )
    sums, at = begin_sums(ring, at, SIZES, PANELS, num_warps)
    # The rows are there, and so are their scales.
    scale = scales_of(a_scale_ptr, piece, SIZES, 0, not IS_STATIC, num_warps)
    rest_scale = scale
    if PARTS == 2:
        rest_scale = scales_of(a_scale_ptr, piece, SIZES, 1, not IS_STATIC, num_warps)
    sums, at = end_sums(ring, at, sums, steps, SIZES, PANELS)
    for part in gl.static_range(PARTS):
        if (part == 0) or has_rest(piece, SIZES):
            for turn in gl.static_range(PANELS):
                store_second(
                    out_ptr,
                    sums[2 * part + turn],
                    scale if part == 0 else rest_scale,
                    columns if turn == 0 else next_columns,
                    operands if part == 0 else rest_operands,
                    piece,
                    block * PANELS + turn,
                    width,
                    SIZES,
                    part,
                    HAS_BIAS,
                    HAS_ROUTER_WEIGHT,
                    POLICY,
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
    POLICY: gl.constexpr,  # of L2 for what is stored
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
                POLICY,
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
                POLICY,
                num_warps,
            )
        piece, piece_at = read_note(pieces, piece_at, PIECES_AHEAD, num_warps)
    write_note(stored, stored_at, piece, STORED_AHEAD, num_warps)
