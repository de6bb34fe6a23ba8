"""What becomes of a tile's sums, once for every kernel: scales, biases, gate, router weights.

T tokens, I intermediate, E local experts, K experts per token, N columns; BM, BN block sizes. What
is read and what is computed are functions of their own, so that a kernel can read meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_math import apply_gate


@triton.jit
def row_scales(
    a_scale_ptr, rows: tl.tensor, INTEGER: tl.constexpr, HAS_ROW_SCALE: tl.constexpr
) -> tl.tensor:
    """Return the activations' scales: [BM, 1], or one value for all rows."""
    if not INTEGER:
        return 1.0
    elif HAS_ROW_SCALE:
        return tl.load(a_scale_ptr + rows)[:, None]
    else:
        return tl.load(a_scale_ptr)


@triton.jit
def column_values(
    w_scale_ptr,
    bias_ptr,
    expert: tl.tensor,  # int64
    column: tl.tensor,  # < width
    width,
    ROWS: tl.constexpr,  # of a weight for each of its columns: 2 with a gate
    PANEL: tl.constexpr,  # which of them
    HAS_BIAS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,  # "channel", "tensor" or "halves"
):
    """Return an expert's weight scales and biases of some columns, [1, BN] each, in fp32."""
    if SCALE_COLUMNS == "channel":
        scale_index = expert * (ROWS * width) + PANEL * width + column
    elif SCALE_COLUMNS == "halves":
        scale_index = expert * 2 + PANEL + column * 0
    else:
        scale_index = expert + column * 0
    scale = tl.load(w_scale_ptr + scale_index)[None, :]
    bias = scale
    if HAS_BIAS:
        bias_index = expert * (ROWS * width) + PANEL * width + column
        bias = tl.load(bias_ptr + bias_index)[None, :].to(tl.float32)
    return scale, bias


@triton.jit
def gate_columns(
    w_scale_ptr,
    bias_ptr,
    expert: tl.tensor,  # int64
    column: tl.tensor,  # < width
    width,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    """Return scales and biases of the first weight's columns: gate and up, the same without."""
    ROWS: tl.constexpr = 2 if GATED else 1
    scale, bias = column_values(
        w_scale_ptr, bias_ptr, expert, column, width, ROWS, 0, HAS_BIAS, SCALE_COLUMNS
    )
    up_scale, up_bias = scale, bias
    if GATED:
        up_scale, up_bias = column_values(
            w_scale_ptr, bias_ptr, expert, column, width, ROWS, 1, HAS_BIAS, SCALE_COLUMNS
        )
    return scale, bias, up_scale, up_bias


@triton.jit
def dequantize(
    acc: tl.tensor,
    a_scale: tl.tensor,  # [BM, 1] or a scalar
    w_scale: tl.tensor,  # [1, BN]
    bias: tl.tensor,  # [1, BN]
    INTEGER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Return float32(acc) * (a_scale * w_scale) + bias; the only place that leaves int32."""
    scale = a_scale * w_scale if INTEGER else w_scale
    value = acc.to(tl.float32)
    if HAS_BIAS:
        return tl.fma(value, scale, bias)
    else:
        return value * scale


@triton.jit
def gated(
    gate: tl.tensor,
    up: tl.tensor,
    a_scale: tl.tensor,  # [BM, 1] or a scalar
    columns,  # of gate_columns
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
) -> tl.tensor:
    """Return f(h[:I]) * (h[I:] + beta) in fp32 of the sums h of one expert."""
    h = dequantize(gate, a_scale, columns[0], columns[1], INTEGER, HAS_BIAS)
    u = h
    if GATED:
        u = dequantize(up, a_scale, columns[2], columns[3], INTEGER, HAS_BIAS)
    return apply_gate(h, u, alpha, beta, limit, ACTIVATION, GATED, HAS_LIMIT)


@triton.jit
def gated_value(
    gate: tl.tensor,
    up: tl.tensor,
    a_scale: tl.tensor,  # [BM, 1] or a scalar
    w_scale_ptr,
    bias_ptr,
    expert: tl.tensor,  # int64
    column: tl.tensor,  # < width
    width,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Return what gated does, reading what it needs."""
    columns = gate_columns(
        w_scale_ptr, bias_ptr, expert, column, width, GATED, HAS_BIAS, SCALE_COLUMNS
    )
    return gated(
        gate,
        up,
        a_scale,
        columns,
        alpha,
        beta,
        limit,
        ACTIVATION,
        GATED,
        HAS_BIAS,
        HAS_LIMIT,
        INTEGER,
    )


@triton.jit
def router_weights(weights_ptr, contribution: tl.tensor, top_k, stride_rt, stride_rk) -> tl.tensor:
    """Return the router weights of contributions, [BM, 1], in fp32."""
    token = (contribution // top_k).to(tl.int64)
    slot = (contribution % top_k).to(tl.int64)
    return tl.load(weights_ptr + token * stride_rt + slot * stride_rk).to(tl.float32)[:, None]


@triton.jit
def weighted_value(
    acc: tl.tensor,
    a_scale: tl.tensor,  # [BM, 1] or a scalar
    w_scale_ptr,
    bias_ptr,
    weights_ptr,
    expert: tl.tensor,  # int64
    contribution: tl.tensor,  # [BM]
    column: tl.tensor,  # < width
    width,
    top_k,
    stride_rt,
    stride_rk,
    HAS_BIAS: tl.constexpr,
    HAS_ROUTER_WEIGHT: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,  # "channel" or "tensor"
) -> tl.tensor:
    """Return (dequantised sums + bias) * router weight in fp32 of one expert."""
    scale, bias = column_values(
        w_scale_ptr, bias_ptr, expert, column, width, 1, 0, HAS_BIAS, SCALE_COLUMNS
    )
    value = dequantize(acc, a_scale, scale, bias, INTEGER, HAS_BIAS)
    if HAS_ROUTER_WEIGHT:
        value *= router_weights(weights_ptr, contribution, top_k, stride_rt, stride_rk)
    return value
