"""The arithmetic of one element, once for every Triton kernel: scales, codes, activations.

One expression per element wherever it sits, so that no kernel or tile rounds it otherwise:
products that feed a sum are explicit fma, because the compiler contracts them at will. All of it
runs in Triton's interpreter, which has no libdevice.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_ALL = tl.constexpr(tl.PropagateNan.ALL)
# Adding and subtracting 1.5 * 2**23 rounds |x| < 2**22 to an integer, halves to even.
ROUND_MAGIC = tl.constexpr(12582912.0)
LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_LN2_HIGH = tl.constexpr(-0.693145751953125)
MINUS_LN2_LOW = tl.constexpr(-1.42860682030941723212e-6)
MINUS_SQRT_8_OVER_PI = tl.constexpr(-1.5957691216057308)
GELU_CUBIC = tl.constexpr(0.044715)
INV_SQRT_2 = tl.constexpr(0.7071067811865476)
# Far enough from the ends of fp32 that no step of a quotient up to 256 leaves them.
LEAST_SCALE = tl.constexpr(2.0**-90)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Return the int32 bits of |x|, whose order is that of the magnitudes, NaN above infinity.

    So an integer maximum, also an atomic one, is exact, free of order and propagates NaN.
    """
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def scale_of(bits: tl.tensor) -> tl.tensor:
    """Return the fp32 scale of a magnitude: amax / 127, and 1 where that quotient is 0."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def encode(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return int8 codes: round_half_even(x / scale) clamped to [-128, 127], NaN as 0."""
    return round_to_code(tl.div_rn(x, scale))


@triton.jit
def encode_by(x: tl.tensor, scale: tl.tensor, reciprocal: tl.tensor) -> tl.tensor:
    """Return what encode returns, given 1 / scale correctly rounded: no division an element.

    Two Markstein steps give the IEEE quotient while LEAST_SCALE <= scale <= 1 / LEAST_SCALE;
    tl.div_rn looks whether they do element by element, with a branch. The cut keeps infinities
    out of the steps and is far beyond the codes.
    """
    bound = 256.0 * scale
    x = tl.minimum(x, bound, propagate_nan=NAN_ALL)
    x = tl.maximum(x, -bound, propagate_nan=NAN_ALL)
    estimate = x * reciprocal
    estimate = tl.fma(tl.fma(-estimate, scale, x), reciprocal, estimate)
    return round_to_code(tl.fma(tl.fma(-estimate, scale, x), reciprocal, estimate))


@triton.jit
def is_extreme(scale: tl.tensor) -> tl.tensor:
    """Say for which scales encode_by does not hold; NaN is not among them."""
    return (scale < LEAST_SCALE) | (scale > 1.0 / LEAST_SCALE)


@triton.jit
def round_to_code(quotient: tl.tensor) -> tl.tensor:
    """Return int8 codes of quotients: clamped to [-128, 127], halves to even, NaN as 0.

    Clamping first gives the same codes, because both bounds are integers.
    """
    code = tl.minimum(quotient, 127.0, propagate_nan=NAN_ALL)
    code = tl.maximum(code, -128.0, propagate_nan=NAN_ALL)
    code = (code + ROUND_MAGIC) - ROUND_MAGIC
    return tl.where(code == code, code, 0.0).to(tl.int8)


@triton.jit
def exact_exp(x: tl.tensor) -> tl.tensor:
    """Return exp(x) to about two units in the last place.

    tl.exp rounds x * log2(e) once, which costs |x| / 2 units; here the reduction is exact.
    """
    x = tl.maximum(tl.minimum(x, 200.0, propagate_nan=NAN_ALL), -200.0, propagate_nan=NAN_ALL)
    whole = tl.fma(x, LOG2_E, ROUND_MAGIC) - ROUND_MAGIC
    part = tl.fma(whole, MINUS_LN2_HIGH, x)
    part = tl.fma(whole, MINUS_LN2_LOW, part)
    return tl.exp2(part * LOG2_E) * tl.exp2(whole)


@triton.jit
def activate(x: tl.tensor, alpha, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return f(x) in fp32; silu is x * sigmoid(alpha * x).

    gelu_tanh: 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2 * y)).
    """
    if ACTIVATION == "silu":
        return tl.div_rn(x, 1.0 + exact_exp(-alpha * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * INV_SQRT_2))
    elif ACTIVATION == "gelu_tanh":
        cubic = tl.fma(x * x * x, GELU_CUBIC, x)
        return tl.div_rn(x, 1.0 + exact_exp(cubic * MINUS_SQRT_8_OVER_PI))
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=NAN_ALL)
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2", "unknown activation")
        return positive * positive if ACTIVATION == "relu2" else positive


@triton.jit
def apply_gate(
    gate: tl.tensor,
    up: tl.tensor,
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
) -> tl.tensor:
    """Return f(min(gate, limit)) * (clamp(up, -limit, limit) + beta), or f(gate) without a gate."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, propagate_nan=NAN_ALL)
        up = tl.minimum(up, limit, propagate_nan=NAN_ALL)
        up = tl.maximum(up, -limit, propagate_nan=NAN_ALL)
    value = activate(gate, alpha, ACTIVATION)
    return value * (up + beta) if GATED else value
