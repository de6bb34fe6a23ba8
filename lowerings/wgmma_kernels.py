"""Grouped products by wgmma_tiles.py, with the epilogues of all other kernels (Gluon, Hopper).

T tokens, H hidden, I intermediate, E local experts, K experts per token; BM, BN, BK block sizes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fused_tiles import rounded
from .tile_math import encode
from .tile_products import gated_value, row_scales, split_panels, weighted_value
from .wgmma_tiles import place_of, start_sequence, tile_sums


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
    stored: gl.constexpr = store_layout(layout, value.dtype, ROWS, BLOCK_N, num_warps)
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
    stored: gl.constexpr = store_layout(layout, value.dtype, ROWS, BLOCK_N, num_warps)
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
    PARTS: gl.constexpr,  # 2: of tiles of at most BM / 2 rows half is multiplied, though all read
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
        ring, at = start_sequence(a, w, grid, PANELS, STAGES, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)
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
