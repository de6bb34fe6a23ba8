"""Rows between the products of stream_tiles.py: counted, quantised, waited for (Gluon, Hopper).

I intermediate. progress is int32 [2 + tiles]: how many pieces are taken, how many chunks of rows
to quantise are, and for each tile how many pieces of its first product are stored, then how many
of its chunks are quantised.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .dependent_launch import wait_for_earlier
from .quantizing import is_narrow
from .stream_tiles import (
    PIECES_AHEAD,
    STORED_AHEAD,
    barrier,
    next_of,
    read_note,
    request_rows,
)
from .tile_math import encode_by_maximum, magnitude_bits, scale_of

TICKETS = gl.constexpr(2)
QUANTIZING_WARPS = gl.constexpr(4)
# Rows that are quantised by one program, and rows and columns at a time.
CHUNK = gl.constexpr(8)
HEIGHT = gl.constexpr(4)
COLUMNS = gl.constexpr(1024)


@triton.jit
def instruct(INSTRUCTION: tl.constexpr, number):
    """Let every thread run an instruction without operands; number: any of 32 bits."""
    tl.inline_asm_elementwise(
        asm=INSTRUCTION + " mov.b32 $0, $1;",
        constraints="=r,r",
        args=[number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fence_for_descriptors(number):
    """Order what this thread wrote or saw written before what descriptors read afterwards."""
    instruct("fence.proxy.async.global;", number)


@triton.jit
def acquire(pointer):
    """Return a count, for every thread to see what was written before it, L1 notwithstanding."""
    return tl.inline_asm_elementwise(
        asm="ld.acquire.gpu.global.b32 $0, [$1];",
        constraints="=r,l",
        args=[pointer.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def pause(number):
    """Sleep for some 100 ns."""
    instruct("nanosleep.u32 100;", number)


@gluon.jit
def count_done(work, tile):
    """Count a piece of a tile's first product, or a chunk of its rows, that is stored."""
    _tiles_ptr, progress_ptr, _num_tiles, _up_blocks, _down_blocks = work
    barrier()
    gl.atomic_add(progress_ptr + TICKETS + tile, 1, sem="release", scope="gpu")


@gluon.jit
def wait_until_done(work, tile, wanted):
    """Wait until so much of a tile is done."""
    _tiles_ptr, progress_ptr, _num_tiles, _up_blocks, _down_blocks = work
    done_ptr = progress_ptr + TICKETS + tile
    while gl.load(done_ptr, volatile=True) < wanted:
        pause(tile)
    # It reads no less; what is compared cannot be left out.
    while acquire(done_ptr) < wanted:
        pause(tile)


@gluon.jit
def count_pieces(stored, work, IS_STATIC: gl.constexpr):
    """Count pieces of the first product that are stored: one warp.

    A count waits for what was stored, some 5 us while weights stream, in which nobody multiplies if
    the warps that stored count themselves.
    """
    piece, at = read_note(stored, (0, 0), STORED_AHEAD, 1)
    while piece[0] >= 0:
        if IS_STATIC:
            fence_for_descriptors(piece[1])
        count_done(work, piece[1])
        piece, at = read_note(stored, at, STORED_AHEAD, 1)


@gluon.jit
def ask_for_rows(
    ring, pieces, work, steps, SIZES: gl.constexpr, IS_STATIC: gl.constexpr, PDL: gl.constexpr
):
    """Ask for the rows of pieces, those of the second product when they are there: one warp."""
    wait_for_earlier(PDL)
    STAGES: gl.constexpr = SIZES[1]
    _weights, _rows, _full, empty = ring
    _tiles_ptr, _progress_ptr, _num_tiles, up_blocks, _down_blocks = work
    slot, phase = 0, 0
    piece, at = read_note(pieces, (0, 0), PIECES_AHEAD, 1)
    while piece[0] >= 0:
        kind, tile, _expert, first, end, _block = piece
        if kind == 0:
            chunks = 0 if IS_STATIC else gl.cdiv(end - first, CHUNK)
            wait_until_done(work, tile, up_blocks + chunks)
            fence_for_descriptors(tile)
        for step in range(gl.where(kind == 1, steps[0], steps[1])):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            if kind == 1:
                request_rows(ring, slot, step, piece, 0, SIZES)
            else:
                request_rows(ring, slot, step, piece, 1, SIZES)
            slot, phase = next_of(slot, phase, STAGES)
        piece, at = read_note(pieces, at, PIECES_AHEAD, 1)


@gluon.jit
def read_block(x_ptr, row_at, is_row, column, width):
    """Return values of some rows and columns in fp32, where they are, and which there are."""
    is_inside = is_row[:, None] & (column < width)[None, :]
    at = row_at + column[None, :]
    return gl.load(x_ptr + at, mask=is_inside, other=0.0).to(gl.float32), at, is_inside


@gluon.jit
def quantize_rows(
    codes_ptr, scale_ptr, x_ptr, first, end, width, IS_WHOLE: gl.constexpr, POLICY: gl.constexpr
):
    """Quantise some rows of the intermediate by their own maxima; IS_WHOLE: in one read."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [QUANTIZING_WARPS, 1], [1, 0])
    offset = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    for start in range(first, end, HEIGHT):
        row = start + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
        is_row = row < end
        row_at = row.to(gl.int64)[:, None] * width
        if IS_WHOLE:
            x, at, is_inside = read_block(x_ptr, row_at, is_row, offset, width)
            scale = scale_of(gl.max(magnitude_bits(x), axis=1))
            gl.store(scale_ptr + row, scale, mask=is_row)
            codes = encode_by_maximum(x, scale[:, None], is_narrow(x_ptr))
            gl.store(codes_ptr + at, codes, mask=is_inside, eviction_policy=POLICY)
        else:
            bits = gl.zeros((HEIGHT,), gl.int32, gl.SliceLayout(1, layout))
            for column in range(0, width, COLUMNS):
                x, _at, _is_inside = read_block(x_ptr, row_at, is_row, column + offset, width)
                bits = gl.maximum(bits, gl.max(magnitude_bits(x), axis=1))
            scale = scale_of(bits)
            gl.store(scale_ptr + row, scale, mask=is_row)
            for column in range(0, width, COLUMNS):
                x, at, is_inside = read_block(x_ptr, row_at, is_row, column + offset, width)
                codes = encode_by_maximum(x, scale[:, None], is_narrow(x_ptr))
                gl.store(codes_ptr + at, codes, mask=is_inside, eviction_policy=POLICY)


@gluon.jit
def quantize_tiles(
    rows,  # pointers of stream_kernel: intermediate, codes, their scales
    work,
    width,
    ROWS: gl.constexpr,
    IS_STATIC: gl.constexpr,
    IS_WHOLE: gl.constexpr,
    POLICY: gl.constexpr,
    PDL: gl.constexpr,
):
    """Quantise chunks of rows that nobody has, when their first product is done: four warps."""
    wait_for_earlier(PDL)
    if not IS_STATIC:
        middle_ptr, codes_ptr, code_scale_ptr = rows
        tiles_ptr, progress_ptr, num_tiles, up_blocks, _down_blocks = work
        CHUNKS: gl.constexpr = ROWS // CHUNK
        ticket = gl.atomic_add(progress_ptr + 1, 1, sem="relaxed", scope="gpu")
        while ticket < num_tiles * CHUNKS:
            tile = ticket // CHUNKS
            tile_ptr = tiles_ptr + 3 * (1 + tile)
            first = gl.load(tile_ptr + 1) + ticket % CHUNKS * CHUNK
            end = gl.minimum(gl.load(tile_ptr + 2), first + CHUNK)
            if first < end:
                # One count for both: no chunk adds to it before all pieces have.
                wait_until_done(work, tile, up_blocks)
                quantize_rows(
                    codes_ptr, code_scale_ptr, middle_ptr, first, end, width, IS_WHOLE, POLICY
                )
                fence_for_descriptors(tile)
                count_done(work, tile)
            ticket = gl.atomic_add(progress_ptr + 1, 1, sem="relaxed", scope="gpu")
