"""Grouped products by wgmma_tiles.py, with the epilogues of all other kernels (Gluon, Hopper).

T tokens, H hidden, I intermediate, E local experts, K experts per token; BM, BN, BK block sizes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .dependent_launch import let_next_start, wait_for_earlier
from .wgmma_epilogues import down_operands, store_down, store_up, up_operands
from .wgmma_tiles import place_due, start_sequence, tile_sums


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
    EVEN_N: gl.constexpr,  # BN divides the width
    PARTS: gl.constexpr,  # 2: of tiles of at most BM / 2 rows half is multiplied, though all read
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """First product with gate, its result quantised at once where the scale is given."""
    wait_for_earlier(PDL)
    let_next_start(PDL)
    PANELS: gl.constexpr = 2 if GATED else 1
    grid = (tiles_ptr, gl.load(tiles_ptr), gl.cdiv(width, BLOCK_N))
    programs = grid[1] * grid[2]
    if gl.program_id(0) < programs:
        ring, at = start_sequence(
            a, w, grid, PANELS, STAGES, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, False
        )
        for _ in range(gl.program_id(0), programs, gl.num_programs(0)):
            place = place_due(at)
            for part in gl.static_range(PARTS):
                if (PARTS == 1) or ((place[2] - place[1] <= BLOCK_M // 2) == (part == 0)):
                    ROWS: gl.constexpr = BLOCK_M // 2 if part + 1 < PARTS else BLOCK_M
                    operands = up_operands(
                        a_scale_ptr,
                        w_scale_ptr,
                        bias_ptr,
                        place,
                        width,
                        PANELS,
                        HAS_BIAS,
                        HAS_ROW_SCALE,
                        SCALE_COLUMNS,
                        EVEN_N,
                        ROWS,
                        BLOCK_N,
                        num_warps,
                    )
                    acc, at = tile_sums(
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
                        acc,
                        operands,
                        place,
                        width,
                        ALPHA,
                        BETA,
                        LIMIT,
                        ACTIVATION,
                        PANELS,
                        HAS_BIAS,
                        HAS_LIMIT,
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
    EVEN_N: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    IS_OLD: gl.constexpr,  # PDL: the weights were there before the kernel ahead started
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Second product, weighted; arguments as in wgmma_up_kernel."""
    wait_for_earlier(PDL and not IS_OLD)
    grid = (tiles_ptr, gl.load(tiles_ptr), gl.cdiv(width, BLOCK_N))
    programs = grid[1] * grid[2]
    if gl.program_id(0) < programs:
        ring, at = start_sequence(a, w, grid, 1, STAGES, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, PDL)
        for _ in range(gl.program_id(0), programs, gl.num_programs(0)):
            place = place_due(at)
            for part in gl.static_range(PARTS):
                if (PARTS == 1) or ((place[2] - place[1] <= BLOCK_M // 2) == (part == 0)):
                    ROWS: gl.constexpr = BLOCK_M // 2 if part + 1 < PARTS else BLOCK_M
                    operands = down_operands(
                        out_ptr,
                        a_scale_ptr,
                        w_scale_ptr,
                        bias_ptr,
                        order_ptr,
                        place,
                        width,
                        HAS_BIAS,
                        HAS_ROW_SCALE,
                        SCALE_COLUMNS,
                        EVEN_N,
                        ROWS,
                        BLOCK_N,
                        num_warps,
                    )
                    acc, at = tile_sums(
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
                        weights_ptr,
                        acc,
                        operands,
                        place,
                        width,
                        TOP_K,
                        stride_rt,
                        stride_rk,
                        HAS_BIAS,
                        HAS_ROUTER_WEIGHT,
                        ROWS,
                        BLOCK_N,
                    )
    else:
        wait_for_earlier(PDL)
