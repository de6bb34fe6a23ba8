"""A layer's products in one launch; stream_tiles.py says how (Gluon, Hopper).

T tokens, H hidden, I intermediate, E local experts, K experts per token.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .dependent_launch import wait_for_earlier
from .stream_pieces import compute_pieces
from .stream_rows import QUANTIZING_WARPS, ask_for_rows, count_pieces, quantize_tiles
from .stream_tiles import (
    PANEL,
    PIECE_READERS,
    PIECES_AHEAD,
    STORED_AHEAD,
    ask_for_weights,
    parts_of,
    start_notes,
    start_ring,
)


@gluon.jit
def stream_kernel(
    out_ptr,  # [T*K, H] by contribution
    middle_ptr,  # [T*K, I] by position, in the result dtype; unused if IS_STATIC
    codes_ptr,  # [T*K, I] its codes
    code_scale_ptr,  # [T*K] fp32 of their rows, or one value if IS_STATIC
    a1,  # descriptor of [T*K, H] codes in expert order, by [head, 128]
    a1_scale_ptr,
    w1,  # descriptor of [E * 2 * I, H] codes, by [64, 128]
    w1_scale_ptr,
    w1_bias_ptr,
    a2,  # descriptor of codes_ptr, as a1
    w2,  # descriptor of [E * H, I] codes, by [64, 128]
    b1,  # as a1 and a2, by [rest, 128], or None where a tile has no rest
    b2,
    w2_scale_ptr,
    w2_bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    progress_ptr,  # of stream_rows.py
    up_steps,  # of the depths
    down_steps,
    intermediate,
    hidden,
    stride_rt,
    stride_rk,
    TOP_K: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_ROW_SCALE: gl.constexpr,
    UP_SCALE_COLUMNS: gl.constexpr,
    DOWN_SCALE_COLUMNS: gl.constexpr,
    HAS_ROUTER_WEIGHT: gl.constexpr,
    DTYPE: gl.constexpr,  # name of the result dtype
    IS_STATIC: gl.constexpr,  # the intermediate is quantised by a given scale
    IS_WHOLE: gl.constexpr,  # its rows are quantised in one read
    ROWS: gl.constexpr,  # of a tile: head and rest; the next three as in start_ring
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
    DOWN_PANELS: gl.constexpr,
    GROUP_M: gl.constexpr,
    POLICY: gl.constexpr,  # of L2 for what is stored
    QUANTIZING_REGISTERS: gl.constexpr,
    ASKING_REGISTERS: gl.constexpr,
    IS_OLD: gl.constexpr,  # PDL: weights and routing were there before the kernel ahead started
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Both products: gate and quantise, then weight.

    h = dequantize(a1 @ w13[expert].T) + bias; codes = quantize(f(h[:I]) * (h[I:] + beta))
    out[contribution] = round((codes @ w2.T dequantised + bias) * router weight)
    """
    wait_for_earlier(PDL and not IS_OLD)
    SIZES: gl.constexpr = (ROWS, STAGES, BOXES, DOWN_PANELS)
    steps, widths = (up_steps, down_steps), (intermediate, hidden)
    rows = (middle_ptr, codes_ptr, code_scale_ptr)
    first_weight = (a1_scale_ptr, w1_scale_ptr, w1_bias_ptr)
    second_weight = (code_scale_ptr, w2_scale_ptr, w2_bias_ptr)
    routed = (weights_ptr, stride_rt, stride_rk, order_ptr, TOP_K)
    GATE: gl.constexpr = (ALPHA, BETA, LIMIT, ACTIVATION, HAS_LIMIT)
    up_blocks = gl.cdiv(intermediate, PANEL)
    down_blocks = gl.cdiv(hidden, DOWN_PANELS * PANEL)
    work = (tiles_ptr, progress_ptr, gl.load(tiles_ptr), up_blocks, down_blocks)
    # Triton 3.6 returns no tuple with None in it.
    rests = (b1, b2) if parts_of(ROWS) == 2 else (a1, a2)
    ring = start_ring((w1, w2), (a1, a2), rests, SIZES)
    pieces = start_notes(PIECES_AHEAD, PIECE_READERS)
    stored = start_notes(STORED_AHEAD, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                compute_pieces,
                (
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
                    SIZES,
                    GATE,
                    HAS_BIAS,
                    HAS_ROW_SCALE,
                    UP_SCALE_COLUMNS,
                    DOWN_SCALE_COLUMNS,
                    HAS_ROUTER_WEIGHT,
                    DTYPE,
                    IS_STATIC,
                    POLICY,
                    PDL,
                    num_warps,
                ),
            ),
            (quantize_tiles, (rows, work, intermediate, ROWS, IS_STATIC, IS_WHOLE, POLICY, PDL)),
            (ask_for_weights, (ring, pieces, work, steps, widths, SIZES, GROUP_M)),
            (ask_for_rows, (ring, pieces, work, steps, SIZES, IS_STATIC, PDL)),
            (count_pieces, (stored, work, IS_STATIC)),
        ],
        [QUANTIZING_WARPS, 1, 1, 1],
        [QUANTIZING_REGISTERS, ASKING_REGISTERS, ASKING_REGISTERS, ASKING_REGISTERS],
    )
