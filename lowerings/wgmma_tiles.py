"""Grouped products whose tensor cores run on while data arrive and tiles end (Gluon, Hopper).

T tokens, H hidden, I intermediate, E local experts, K experts per token; BM, BN, BK block sizes;
positions and tiles as in tile_products.py, rows in expert order. Triton 3.6 waits for the tensor
cores after every integer product; Gluon, its lower level, lets one be in flight.

A program takes every num_programs-th tile, each in `steps` depth steps: one sequence of steps, of
which step c lies in buffer c % STAGES behind a barrier of its own. Loads run STAGES - 1 steps ahead
of the products, past the end of a tile, so that those of the next come during an epilogue.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .dependent_launch import let_next_start, wait_for_earlier
from .tile_products import tile_of


@gluon.constexpr_function
def product_layout(rows, columns, warps):
    """Return how a tile's sums lie in registers: 64 rows a group of four warps, or half columns.

    int8 has no instruction of 256 columns here (Triton 3.6 stops on an assertion).
    """
    if rows >= 16 * warps:
        per_warp, instruction = [warps, 1], min(columns, 128)
    else:
        per_warp, instruction = [4, warps // 4], min(columns // (warps // 4), 64)
    return gl.NVMMADistributedLayout([3, 0], per_warp, [16, instruction, 32])


@gluon.jit
def place_of(pid, grid, GROUP_M: gl.constexpr):
    """Return expert, first and end position, and column block of a program's tile."""
    tiles_ptr, num_tiles, column_blocks = grid
    tile, column_block = tile_of(pid, num_tiles, column_blocks, GROUP_M)
    tile_ptr = tiles_ptr + 3 * (1 + tile)
    return gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), column_block


@gluon.jit
def request_weights(
    ring,
    slot,
    step,
    expert,
    column_block,
    PANELS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Ask for the weights of one depth step of a tile, whose rows are to follow."""
    _a, w, _a_buffers, w_buffers, barriers = ring
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, (BLOCK_M + PANELS * BLOCK_N) * BLOCK_K)
    corner = [expert * PANELS, column_block * BLOCK_N, step * BLOCK_K]
    tma.async_copy_global_to_shared(w, corner, barrier, w_buffers.index(slot))


@gluon.jit
def request_rows(ring, slot, step, first, BLOCK_K: gl.constexpr):
    """Ask for the rows of one depth step of a tile; past their ends descriptors read zeros."""
    a, _w, a_buffers, _w_buffers, barriers = ring
    corner = [first, step * BLOCK_K]
    tma.async_copy_global_to_shared(a, corner, barriers.index(slot), a_buffers.index(slot))


@gluon.jit
def start_sequence(
    a,
    w,
    grid,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    PDL: gl.constexpr,
):
    """Return a ring of buffers with the first steps under way, and where the sequence is.

    ring: descriptors, buffers and barriers; at: buffer and phase of the step that is due, then
    program, step and buffer of the one to ask for next, and its place. PDL: weights come before
    the wait for the kernels ahead, which write the rows.
    """
    a_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    w_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, PANELS, BLOCK_N, BLOCK_K], w.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(barriers.index(slot), count=1)
    fence_async_shared()
    ring = (a, w, a_buffers, w_buffers, barriers)
    pid = gl.program_id(0)
    place = place_of(pid, grid, GROUP_M)
    expert, first, _end, column_block = place
    for step in gl.static_range(STAGES - 1):
        request_weights(ring, step, step, expert, column_block, PANELS, BLOCK_M, BLOCK_N, BLOCK_K)
    wait_for_earlier(PDL)
    let_next_start(PDL)
    for step in gl.static_range(STAGES - 1):
        request_rows(ring, step, step, first, BLOCK_K)
    return ring, (0, 0, pid, STAGES - 1, STAGES - 1, place)


@gluon.jit
def place_due(at):
    """Return expert, first and end position, and column block of the tile that begins.

    It is the one that is asked for: loads run ahead by no more steps than a tile has.
    """
    return at[5]


@gluon.jit
def add_step(
    ring,
    grid,
    at,
    acc,
    steps,
    IS_FIRST: gl.constexpr,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,  # that are multiplied: BLOCK_M, or half as many
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """Begin to add the products of one depth step, and ask for a later step's operands."""
    a_buffers, w_buffers, barriers = ring[2], ring[3], ring[4]
    slot, phase, next_pid, next_step, next_slot, place = at
    mbarrier.wait(barriers.index(slot), phase)
    rows = a_buffers.index(slot).slice(0, ROWS, 0)
    codes = w_buffers.index(slot).reshape((PANELS * BLOCK_N, BLOCK_K)).permute((1, 0))
    acc = warpgroup_mma(rows, codes, acc, use_acc=not IS_FIRST, is_async=True)
    # The product before has ended then, and its buffer is free: for these warps. Triton puts
    # a barrier of all before the load that fills it (a test reads the assembly).
    acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
    programs = grid[1] * grid[2]
    if next_step == steps:
        next_step = 0
        next_pid += gl.num_programs(0)
        if next_pid < programs:
            place = place_of(next_pid, grid, GROUP_M)
    if next_pid < programs:
        expert, first, _end, column_block = place
        request_weights(
            ring, next_slot, next_step, expert, column_block, PANELS, BLOCK_M, BLOCK_N, BLOCK_K
        )
        request_rows(ring, next_slot, next_step, first, BLOCK_K)
    next_step += 1
    next_slot = next_slot + 1 if next_slot < STAGES - 1 else 0
    phase = phase if slot < STAGES - 1 else phase ^ 1
    slot = slot + 1 if slot < STAGES - 1 else 0
    return acc, (slot, phase, next_pid, next_step, next_slot, place)


@gluon.jit
def tile_sums(
    ring,
    grid,
    at,
    steps,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Return a tile's int32 sums, the last under way, and where the sequence is then.

    Gate and up lie side by side, as in product_layout; ended_sums waits for the sums.
    """
    layout: gl.constexpr = product_layout(ROWS, PANELS * BLOCK_N, num_warps)
    acc = warpgroup_mma_init(gl.zeros((ROWS, PANELS * BLOCK_N), gl.int32, layout))
    # By itself, for it need not read the zeros: their registers would be cleared for each tile.
    acc, at = add_step(
        ring,
        grid,
        at,
        acc,
        steps,
        True,
        PANELS,
        STAGES,
        ROWS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP_M,
    )
    for _ in range(1, steps):
        acc, at = add_step(
            ring,
            grid,
            at,
            acc,
            steps,
            False,
            PANELS,
            STAGES,
            ROWS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP_M,
        )
    return acc, at


@gluon.jit
def ended_sums(acc):
    """Return a tile's sums when they are there."""
    return warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
