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
def request(
    ring,
    slot,
    step,
    expert,
    first,
    column_block,
    PANELS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """Ask for one depth step of a tile; past their ends descriptors read zeros."""
    a, w, a_buffers, w_buffers, barriers = ring
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, (BLOCK_M + PANELS * BLOCK_N) * BLOCK_K)
    start = step * BLOCK_K
    tma.async_copy_global_to_shared(a, [first, start], barrier, a_buffers.index(slot))
    corner = [expert * PANELS, column_block * BLOCK_N, start]
    tma.async_copy_global_to_shared(w, corner, barrier, w_buffers.index(slot))


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
):
    """Return a ring of buffers with the first steps under way, and where the sequence is.

    ring: descriptors, buffers and barriers; at: buffer and phase of the step that is due, then
    program, step, buffer, expert, first row and column block of the one to ask for next.
    """
    a_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    w_buffers = gl.allocate_shared_memory(gl.int8, [STAGES, PANELS, BLOCK_N, BLOCK_K], w.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(barriers.index(slot), count=1)
    fence_async_shared()
    ring = (a, w, a_buffers, w_buffers, barriers)
    pid = gl.program_id(0)
    expert, first, _end, column_block = place_of(pid, grid, GROUP_M)
    for step in gl.static_range(STAGES - 1):
        request(ring, step, step, expert, first, column_block, PANELS, BLOCK_M, BLOCK_N, BLOCK_K)
    return ring, (0, 0, pid, STAGES - 1, STAGES - 1, expert, first, column_block)


@gluon.jit
def tile_sums(
    ring,
    grid,
    at,
    steps,
    PANELS: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,  # that are multiplied: BLOCK_M, or half as many
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Return a tile's int32 sums, gate and up side by side, and where the sequence is then."""
    a_buffers, w_buffers, barriers = ring[2], ring[3], ring[4]
    slot, phase, next_pid, next_step, next_slot, next_expert, next_first, next_column = at
    programs = grid[1] * grid[2]
    COLUMNS: gl.constexpr = PANELS * BLOCK_N
    layout: gl.constexpr = product_layout(ROWS, COLUMNS, num_warps)
    acc = warpgroup_mma_init(gl.zeros((ROWS, COLUMNS), gl.int32, layout))
    for _ in range(steps):
        mbarrier.wait(barriers.index(slot), phase)
        rows = a_buffers.index(slot).slice(0, ROWS, 0)
        codes = w_buffers.index(slot).reshape((COLUMNS, BLOCK_K)).permute((1, 0))
        acc = warpgroup_mma(rows, codes, acc, is_async=True)
        # The product before has ended then, and its buffer is free: for these warps. Triton puts
        # a barrier of all before the load that fills it (a test reads the assembly).
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        if next_step == steps:
            next_step = 0
            next_pid += gl.num_programs(0)
            if next_pid < programs:
                next_expert, next_first, _end, next_column = place_of(next_pid, grid, GROUP_M)
        if next_pid < programs:
            request(
                ring,
                next_slot,
                next_step,
                next_expert,
                next_first,
                next_column,
                PANELS,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
        next_step += 1
        next_slot = next_slot + 1 if next_slot < STAGES - 1 else 0
        phase = phase if slot < STAGES - 1 else phase ^ 1
        slot = slot + 1 if slot < STAGES - 1 else 0
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    at = (slot, phase, next_pid, next_step, next_slot, next_expert, next_first, next_column)
    return sums, at
