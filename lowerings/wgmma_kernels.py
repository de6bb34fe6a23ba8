"""Grouped products whose tensor cores run on while data arrive and tiles end (Gluon, Hopper).

T tokens, H hidden, I intermediate, E local experts, K experts per token; BM, BN, BK block sizes;
positions and tiles as in tile_products.py, rows in expert order. Triton 3.6 waits for the tensor
cores after every integer product; Gluon, its lower level, lets one be in flight.

A program takes every num_programs-th tile, each in `steps` depth steps: one sequence of steps, of
which step c lies in buffer c % STAGES behind a barrier of its own. Loads run STAGES - 1 steps ahead
of the products, past the end of a tile, so that those of the next come during an epilogue. The
epilogue itself is that of the other kernels.
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

from .fused_tiles import rounded
from .tile_math import encode
from .tile_products import gated_value, row_scales, split_panels, tile_of, weighted_value


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


@gluon.constexpr_function
def store_layout(rows, columns, warps):
    """Return how a tile is stored: eight values a thread, its rows still with their warps.

    Stored as the products leave them, two values a thread, the second product took 250 us instead
    of 169 (Qwen3-30B-A3B, 4096 tokens).
    """
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
        request(
            ring, step, step, expert, first, column_block, PANELS, BLOCK_M, BLOCK_N, BLOCK_K
        )
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
        # The product before has ended then, and its buffer is free.
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


@gluon.jit
def store_up(
    out_ptr,
    code_scale_ptr,
    a_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    sums,
    expert,
    first,
    end,
    column_block,
    width,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PANELS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    DTYPE: gl.constexpr,
    IS_STATIC: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Gate and store one tile of the first product, by position."""
    GATED: gl.constexpr = PANELS == 2
    gate, up = split_panels(sums, GATED, ROWS, BLOCK_N)
    layout: gl.constexpr = gate.type.layout
    row = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), end - 1)
    column = column_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    value = gated_value(
        gate,
        up,
        row_scales(a_scale_ptr, row, True, HAS_ROW_SCALE),
        w_scale_ptr,
        bias_ptr,
        expert.to(gl.int64),
        gl.minimum(column, width - 1),
        width,
        ALPHA,
        BETA,
        LIMIT,
        ACTIVATION,
        GATED,
        HAS_BIAS,
        HAS_LIMIT,
        True,
        SCALE_COLUMNS,
    )
    value = rounded(value, DTYPE)
    if IS_STATIC:
        scale = gl.load(code_scale_ptr) + gl.zeros((ROWS, 1), gl.float32, layout)
        value = encode(value.to(gl.float32), scale)
    stored: gl.constexpr = store_layout(ROWS, BLOCK_N, num_warps)
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    column = column_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    at = position.to(gl.int64)[:, None] * width + column[None, :]
    is_inside = (position < end)[:, None] & (column < width)[None, :]
    gl.store(out_ptr + at, gl.convert_layout(value, stored), mask=is_inside)


@gluon.jit
def store_down(
    out_ptr,
    a_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    sums,
    expert,
    first,
    end,
    column_block,
    width,
    top_k,
    stride_rt,
    stride_rk,
    HAS_BIAS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Weight and store one tile of the second product, by contribution."""
    layout: gl.constexpr = sums.type.layout
    row = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), end - 1)
    column = column_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    value = weighted_value(
        sums,
        row_scales(a_scale_ptr, row, True, HAS_ROW_SCALE),
        w_scale_ptr,
        bias_ptr,
        weights_ptr,
        expert.to(gl.int64),
        gl.load(order_ptr + row),
        gl.minimum(column, width - 1),
        width,
        top_k,
        stride_rt,
        stride_rk,
        HAS_BIAS,
        HAS_ROUTER_WEIGHT,
        True,
        SCALE_COLUMNS,
    )
    value = value.to(out_ptr.dtype.element_ty)
    stored: gl.constexpr = store_layout(ROWS, BLOCK_N, num_warps)
    position = first + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    column = column_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    contribution = gl.load(order_ptr + gl.minimum(position, end - 1))
    at = contribution.to(gl.int64)[:, None] * width + column[None, :]
    is_inside = (position < end)[:, None] & (column < width)[None, :]
    gl.store(out_ptr + at, gl.convert_layout(value, stored), mask=is_inside)


@gluon.jit
def wgmma_up_kernel(
    out_ptr,  # [T*K, I] by position, in the result dtype, or codes if IS_STATIC
    code_scale_ptr,  # IS_STATIC: one value
    a,  # descriptor of [T*K, H] codes in expert order, by [BM, BK]
    a_scale_ptr,
    w,  # descriptor of [E * panels, I, H] codes, by [panels, BN, BK]
    w_scale_ptr,
    bias_ptr,
    tiles_ptr,
    steps,  # of the depth, at least STAGES - 1
    width,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    DTYPE: gl.constexpr,  # name of the result dtype
    IS_STATIC: gl.constexpr,
    PARTS: gl.constexpr,  # 2: tiles of at most BM / 2 rows are multiplied as half ones
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):
    """First product with gate, its result quantised at once where the scale is given."""
    PANELS: gl.constexpr = 2 if GATED else 1
    grid = (tiles_ptr, gl.load(tiles_ptr), gl.cdiv(width, BLOCK_N))
    programs = grid[1] * grid[2]
    if gl.program_id(0) < programs:
        ring, at = start_sequence(
            a, w, grid, PANELS, STAGES, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M
        )
        for pid in range(gl.program_id(0), programs, gl.num_programs(0)):
            expert, first, end, column_block = place_of(pid, grid, GROUP_M)
            for part in gl.static_range(PARTS):
                if (PARTS == 1) or ((end - first <= BLOCK_M // 2) == (part == 0)):
                    ROWS: gl.constexpr = BLOCK_M // 2 if part + 1 < PARTS else BLOCK_M
                    sums, at = tile_sums(
                        ring,
                        grid,
                        at,
                        steps,
                        PANELS,
                        STAGES,
                        ROWS,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        GROUP_M,
                        num_warps,
                    )
                    store_up(
                        out_ptr,
                        code_scale_ptr,
                        a_scale_ptr,
                        w_scale_ptr,
                        bias_ptr,
                        sums,
                        expert,
                        first,
                        end,
                        column_block,
                        width,
                        ALPHA,
                        BETA,
                        LIMIT,
                        ACTIVATION,
                        PANELS,
                        HAS_BIAS,
                        HAS_LIMIT,
                        HAS_ROW_SCALE,
                        SCALE_COLUMNS,
                        DTYPE,
                        IS_STATIC,
                        ROWS,
                        BLOCK_N,
                        num_warps,
                    )


@gluon.jit
def wgmma_down_kernel(
    out_ptr,  # [T*K, H] by contribution
    a,  # descriptor of [T*K, I] codes by position, by [BM, BK]
    a_scale_ptr,
    w,  # descriptor of [E, H, I] codes, by [1, BN, BK]
    w_scale_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    steps,
    width,
    stride_rt,
    stride_rk,
    TOP_K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Second product, weighted; arguments as in wgmma_up_kernel."""
    grid = (tiles_ptr, gl.load(tiles_ptr), gl.cdiv(width, BLOCK_N))
    programs = grid[1] * grid[2]
    if gl.program_id(0) < programs:
        ring, at = start_sequence(a, w, grid, 1, STAGES, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
        for pid in range(gl.program_id(0), programs, gl.num_programs(0)):
            expert, first, end, column_block = place_of(pid, grid, GROUP_M)
            for part in gl.static_range(PARTS):
                if (PARTS == 1) or ((end - first <= BLOCK_M // 2) == (part == 0)):
                    ROWS: gl.constexpr = BLOCK_M // 2 if part + 1 < PARTS else BLOCK_M
                    sums, at = tile_sums(
                        ring,
                        grid,
                        at,
                        steps,
                        1,
                        STAGES,
                        ROWS,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        GROUP_M,
                        num_warps,
                    )
                    store_down(
                        out_ptr,
                        a_scale_ptr,
                        w_scale_ptr,
                        bias_ptr,
                        weights_ptr,
                        order_ptr,
                        sums,
                        expert,
                        first,
                        end,
                        column_block,
                        width,
                        TOP_K,
                        stride_rt,
                        stride_rk,
                        HAS_BIAS,
                        HAS_ROUTER_WEIGHT,
                        HAS_ROW_SCALE,
                        SCALE_COLUMNS,
                        ROWS,
                        BLOCK_N,
                        num_warps,
                    )
