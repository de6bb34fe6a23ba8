"""Both products as one sequence of pieces whose weights never stop coming (Gluon, Hopper).

T tokens, H hidden, I intermediate, E local experts, K experts per token; positions and tiles of
rows as in tile_products.py, rows in expert order.

A piece is one block of columns for one tile of rows: all of the first product, then all of the
second. A program takes the next piece that nobody has, so that programs end together, and one that
waits for rows does so for pieces that others have begun, never for a program that cannot start.
Warps have parts of their own: one asks for weights, as many depth steps ahead as there are buffers,
whatever becomes of the pieces before; one asks for rows, which in the second product must be there
first; four multiply and store (stream_pieces.py); one counts what is stored and four quantise it
(stream_rows.py). They tell each other of pieces by notes in shared memory.

Weights are the wide operand, 64 of them an instruction, with a multiple of eight rows: a tile of
few rows multiplies little more than it has. Its rows may be a head and a rest, two powers of two,
as a tensor has one; the rest is loaded where there are so many. So the weights of an expert that
gets somewhat more rows than most are still read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .tile_products import tile_of

# Columns of a block of weights; a piece of the first product has one of gate and one of up.
PANEL = gl.constexpr(64)
# Codes of a row of weights in a buffer.
BOX_K = gl.constexpr(128)
# Notes of numbers that warps leave each other: of pieces that come, and of those stored.
NOTE_SIZE = gl.constexpr(6)
PIECES_AHEAD = gl.constexpr(4)
PIECE_READERS = gl.constexpr(2)
STORED_AHEAD = gl.constexpr(8)


@triton.jit
def barrier():
    """Wait for all threads of these warps."""
    tl.debug_barrier()


@gluon.jit
def next_of(slot, phase, COUNT: gl.constexpr):
    """Return the buffer after one of a ring, and its phase."""
    is_last = slot == COUNT - 1
    return gl.where(is_last, 0, slot + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.constexpr_function
def parts_of(rows):
    """Return how many parts a tile's rows have: 1 if a power of two, else head and rest."""
    return 1 if rows & (rows - 1) == 0 else 2


@gluon.constexpr_function
def part_rows(rows, part):
    """Return the rows of a tile's head, the largest power of two, or of the rest."""
    head = 1 << rows.bit_length() - 1
    return head if part == 0 else rows - head


@gluon.jit
def has_rest(piece, SIZES: gl.constexpr):
    """Say whether a piece has more rows than the head of a tile."""
    return piece[3] + part_rows(SIZES[0], 0) < piece[4]


@gluon.jit
def start_ring(weights, heads, rests, SIZES: gl.constexpr):
    """Return descriptors and empty buffers of weights and rows, and their barriers: full and empty.

    weights: descriptors of both products'; heads, rests: those of rows, for the head and the rest
    of a tile's. Where there is no rest, its buffers are those of the head.
    SIZES: (rows of a tile, buffers, boxes of weights a step, panels of a piece of the second
    product). Its steps are deeper where it has one panel.
    """
    ROWS: gl.constexpr = SIZES[0]
    STAGES: gl.constexpr = SIZES[1]
    BOXES: gl.constexpr = SIZES[2]
    ROW_BOXES: gl.constexpr = SIZES[2] // SIZES[3]
    w_layout: gl.constexpr = weights[0].layout
    a_layout: gl.constexpr = heads[0].layout
    HEAD: gl.constexpr = part_rows(ROWS, 0)
    head_buffers = gl.allocate_shared_memory(gl.int8, [STAGES * ROW_BOXES, HEAD, BOX_K], a_layout)
    rest_buffers = head_buffers
    if parts_of(ROWS) == 2:
        b_layout: gl.constexpr = rests[0].layout
        SHAPE: gl.constexpr = [STAGES * ROW_BOXES, part_rows(ROWS, 1), BOX_K]
        rest_buffers = gl.allocate_shared_memory(gl.int8, SHAPE, b_layout)
    w_buffers = gl.allocate_shared_memory(gl.int8, [STAGES * BOXES, PANEL, BOX_K], w_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(empty.index(slot), count=1)
    rows = (heads, rests, head_buffers, rest_buffers)
    return (weights[0], weights[1], w_buffers), rows, full, empty


@gluon.jit
def start_notes(COUNT: gl.constexpr, READERS: gl.constexpr):
    """Return an empty ring of notes and its barriers: written, and read by so many readers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [COUNT * NOTE_SIZE, 1], layout)
    written = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for note in gl.static_range(COUNT):
        mbarrier.init(written.index(note), count=1)
        mbarrier.init(read.index(note), count=READERS)
    return numbers, written, read


@gluon.jit
def write_note(notes, at, piece, COUNT: gl.constexpr, num_warps: gl.constexpr):
    """Tell the readers of a piece, after what these warps did before; returns the next note.

    at: note and phase.
    """
    numbers, written, read = notes
    note, phase = at
    mbarrier.wait(read.index(note), phase ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    for index in gl.static_range(NOTE_SIZE):
        value = gl.full([1], 0, gl.int32, layout) + piece[index]
        numbers.index(note * NOTE_SIZE + index).store(value)
    barrier()
    mbarrier.arrive(written.index(note), count=1)
    return next_of(note, phase, COUNT)


@gluon.jit
def note_number(notes, note, index: gl.constexpr, num_warps: gl.constexpr):
    """Return one of a note's numbers."""
    numbers, _written, _read = notes
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    return gl.sum(numbers.index(note * NOTE_SIZE + index).load(layout), axis=0)


@gluon.jit
def read_note(notes, at, COUNT: gl.constexpr, num_warps: gl.constexpr):
    """Return the piece that a note tells of, and the next note.

    A piece is 1 for the first product, 0 for the second, -1 for none, then its tile, expert, first
    and end position, and column block.
    """
    _numbers, written, read = notes
    note, phase = at
    mbarrier.wait(written.index(note), phase)
    kind = note_number(notes, note, 0, num_warps)
    tile = note_number(notes, note, 1, num_warps)
    expert = note_number(notes, note, 2, num_warps)
    first = note_number(notes, note, 3, num_warps)
    end = note_number(notes, note, 4, num_warps)
    block = note_number(notes, note, 5, num_warps)
    barrier()
    mbarrier.arrive(read.index(note), count=1)
    return (kind, tile, expert, first, end, block), next_of(note, phase, COUNT)


@gluon.jit
def take_piece(work, GROUP_M: gl.constexpr):
    """Take the next piece that nobody has; returns it as read_note does."""
    tiles_ptr, progress_ptr, num_tiles, up_blocks, down_blocks = work
    ticket = gl.atomic_add(progress_ptr, 1, sem="relaxed", scope="gpu")
    up_pieces = num_tiles * up_blocks
    is_up = ticket < up_pieces
    is_some = ticket < up_pieces + num_tiles * down_blocks
    number = gl.where(is_some, gl.where(is_up, ticket, ticket - up_pieces), 0)
    blocks = gl.where(is_up, up_blocks, down_blocks)
    tile, block = tile_of(number, gl.maximum(num_tiles, 1), blocks, GROUP_M)
    tile_ptr = tiles_ptr + 3 * (1 + tile)
    kind = gl.where(is_some, gl.where(is_up, 1, 0), -1)
    return kind, tile, gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), block


@gluon.jit
def request_weights(ring, slot, step, piece, widths, SIZES: gl.constexpr):
    """Ask for the weights of one depth step of a piece."""
    BOXES: gl.constexpr = SIZES[2]
    DOWN_PANELS: gl.constexpr = SIZES[3]
    weights, _rows, full, _empty = ring
    w1, w2, buffers = weights
    kind, _tile, expert, _first, _end, block = piece
    up_width, down_width = widths
    ready = full.index(slot)
    mbarrier.expect(ready, BOXES * PANEL * BOX_K)
    if kind == 1:
        row = expert * 2 * up_width + block * PANEL
        for box in gl.static_range(BOXES):
            corner = [row + box % 2 * up_width, (step * (BOXES // 2) + box // 2) * BOX_K]
            buffer = buffers.index(slot * BOXES + box)
            tma.async_copy_global_to_shared(w1, corner, ready, buffer)
    else:
        row = expert * down_width + block * (DOWN_PANELS * PANEL)
        for box in gl.static_range(BOXES):
            depth = step * (BOXES // DOWN_PANELS) + box // DOWN_PANELS
            corner = [row + box % DOWN_PANELS * PANEL, depth * BOX_K]
            buffer = buffers.index(slot * BOXES + box)
            tma.async_copy_global_to_shared(w2, corner, ready, buffer)


@gluon.jit
def ask_for_weights(ring, pieces, work, steps, widths, SIZES: gl.constexpr, GROUP_M: gl.constexpr):
    """Take pieces, tell of them, and ask for their weights: one warp.

    steps, widths: of both products. The next piece is taken while a buffer for the last step of
    one is waited for, no earlier: with pieces taken three ahead layers took 2 to 3 % longer.
    """
    STAGES: gl.constexpr = SIZES[1]
    _weights, _rows, _full, empty = ring
    slot, phase, at = 0, 0, (0, 0)
    piece = take_piece(work, GROUP_M)
    while piece[0] >= 0:
        at = write_note(pieces, at, piece, PIECES_AHEAD, 1)
        due = piece
        count = gl.where(due[0] == 1, steps[0], steps[1])
        for step in range(count):
            if step == count - 1:
                piece = take_piece(work, GROUP_M)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            request_weights(ring, slot, step, due, widths, SIZES)
            slot, phase = next_of(slot, phase, STAGES)
    write_note(pieces, at, piece, PIECES_AHEAD, 1)


@gluon.jit
def request_rows(ring, slot, step, piece, PRODUCT: gl.constexpr, SIZES: gl.constexpr):
    """Ask for the rows of one depth step, of a tile's rest where it has one.

    PRODUCT: 0 or 1. Past their ends descriptors read zeros. What is not asked for is whatever the
    buffer has, and so are sums that nobody stores.
    """
    ROWS: gl.constexpr = SIZES[0]
    HEAD: gl.constexpr = part_rows(ROWS, 0)
    ROW_BOXES: gl.constexpr = SIZES[2] // SIZES[3]
    BOXES: gl.constexpr = SIZES[2] // 2 if PRODUCT == 0 else ROW_BOXES
    _weights, rows, full, _empty = ring
    heads, rests, head_buffers, rest_buffers = rows
    first = piece[3]
    is_whole = has_rest(piece, SIZES)
    ready = full.index(slot)
    if parts_of(ROWS) == 2:
        mbarrier.expect(ready, BOXES * ROWS * BOX_K, pred=is_whole)
        mbarrier.expect(ready, BOXES * HEAD * BOX_K, pred=is_whole ^ True)
    else:
        mbarrier.expect(ready, BOXES * HEAD * BOX_K)
    for box in gl.static_range(BOXES):
        depth, at = (step * BOXES + box) * BOX_K, slot * ROW_BOXES + box
        descriptor, buffer = heads[PRODUCT], head_buffers.index(at)
        tma.async_copy_global_to_shared(descriptor, [first, depth], ready, buffer)
        if parts_of(ROWS) == 2:
            descriptor, buffer = rests[PRODUCT], rest_buffers.index(at)
            corner = [first + HEAD, depth]
            tma.async_copy_global_to_shared(descriptor, corner, ready, buffer, pred=is_whole)
