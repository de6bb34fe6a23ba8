"""The arithmetic of one element, once for every Triton kernel: scales, codes, activations.

One expression per element wherever it sits, so that no kernel or tile rounds it otherwise:
products that feed a sum are explicit fma, because the compiler contracts them at will. All of it
runs in Triton's interpreter, which has no libdevice.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Adding and subtracting 1.5 * 2**23 rounds |x| < 2**22 to an integer, halves to even.
ROUND_MAGIC = tl.constexpr(12582912.0)
# Bits of 2**-100 and 2**100.
LEAST_USUAL = tl.constexpr(27 << 23)
MOST_USUAL = tl.constexpr(227 << 23)
# The same with 127 in the low bits, below which a sum's integer is an exponent's field.
EXPONENT_MAGIC = tl.constexpr(12583039.0)
# log2(e) to fp32, and what that lacks.
LOG2_E = tl.constexpr(1.44269502162933349609375)
LOG2_E_REST = tl.constexpr(1.92596298909109e-08)
# Where exp is 0 and infinity here.
LEAST_EXPONENT = tl.constexpr(-88.0)
MOST_EXPONENT = tl.constexpr(88.5)
MINUS_SQRT_8_OVER_PI = tl.constexpr(-1.5957691216057308)
GELU_CUBIC = tl.constexpr(0.044715)
INV_SQRT_2 = tl.constexpr(0.7071067811865476)


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
    """Return int8 codes: round_half_even(x / scale) clamped to [-128, 127], NaN as 0.

    One division a scale: two Markstein steps from its rounded reciprocal give the IEEE quotient,
    with both operands times the power of two that puts the scale into [1, 2), so that no step
    leaves the normal numbers (tl.div_rn looks element by element whether one does, with a branch).
    Cut before the steps, to keep infinities out; a quotient of the cut rounds to the bound. The
    code is the low byte of the rounded sum, because conversions run at an eighth of the rate.
    """
    factor = power_against(scale)
    divisor = scale * factor
    reciprocal = tl.div_rn(1.0, divisor)
    x = tl.minimum(x * factor, 127.0 * divisor, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x, -128.0 * divisor, propagate_nan=tl.PropagateNan.ALL)
    quotient = x * reciprocal
    quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    code = (quotient + ROUND_MAGIC).to(tl.int32, bitcast=True)
    return tl.where(quotient == quotient, code, 0).to(tl.int8)


@triton.jit
def encode_by_maximum(x: tl.tensor, scale: tl.tensor, NARROW: tl.constexpr) -> tl.tensor:
    """Return int8 codes of rows by scale_of their own greatest magnitudes, as encode gives them.

    NARROW: x are values of bf16 or fp16. Then nothing has to be cut, and one Markstein step is
    enough: it gives encode's code for every pair of a value's and a maximum's significand
    (tests/test_lowerings_codes.py goes through them). Rows that are not finite, or so far from 1
    that a step leaves the normal numbers, take the other way, with all of their program's.
    """
    # Either branch replaces them; Gluon, which calls this, has no zeros without a layout.
    codes = magnitude_bits(x).to(tl.int8)
    is_usual = NARROW
    if NARROW:
        bits = scale.to(tl.int32, bitcast=True)
        is_usual = (tl.min(bits) >= LEAST_USUAL) & (tl.max(bits) <= MOST_USUAL)
    if is_usual:
        reciprocal = tl.div_rn(1.0, scale)
        quotient = x * reciprocal
        quotient = tl.fma(tl.fma(-quotient, scale, x), reciprocal, quotient)
        codes = (quotient + ROUND_MAGIC).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        codes = encode(x, scale)
    return codes


@triton.jit
def codes_to_float(codes: tl.tensor, dtype: tl.constexpr, PACKED: tl.constexpr) -> tl.tensor:
    """Return int8 codes as floats, exactly; packed ones are code_unit too small.

    PACKED (CUDA from sm_80 on, bf16 and fp16): 1.25 instructions a code, four at a time, where the
    compiler's own conversion takes 2 (bf16 from sm_90 on) or 2.75, one of them at a quarter of the
    rate. A byte b = code + 128 put below 0x64 is the fp16 number 1024 + b, from which 1152 is
    taken. In bf16 it is below 0x00, for 8 bits do not fit into 7: that is b * 2**-133, as subnormal
    and least normal numbers have one spacing, and b * 2**-6 - 2 is one fma.
    """
    if not PACKED:
        return codes.to(dtype)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            asm="""
            {
                .reg .b32 bytes, low, high, offset;
                xor.b32 bytes, $2, 0x80808080;
                prmt.b32 low, bytes, 0x64646464, 0x4140;
                prmt.b32 high, bytes, 0x64646464, 0x4342;
                mov.b32 offset, 0x64806480;
                sub.rn.f16x2 $0, low, offset;
                sub.rn.f16x2 $1, high, offset;
            }
            """,
            constraints="=r,=r,r",
            args=[codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        tl.static_assert(dtype == tl.bfloat16, "packed conversion to neither bf16 nor fp16")
        return tl.inline_asm_elementwise(
            asm="""
            {
                .reg .b32 bytes, low, high, factor, offset;
                xor.b32 bytes, $2, 0x80808080;
                prmt.b32 low, bytes, 0, 0x4140;
                prmt.b32 high, bytes, 0, 0x4342;
                mov.b32 factor, 0x7F007F00;
                mov.b32 offset, 0xC000C000;
                fma.rn.bf16x2 $0, low, factor, offset;
                fma.rn.bf16x2 $1, high, factor, offset;
            }
            """,
            constraints="=r,=r,r",
            args=[codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def code_unit(dtype: tl.constexpr, PACKED: tl.constexpr):
    """Return what sums of converted codes are still to be multiplied by: 64 for packed bf16."""
    return 64.0 if (PACKED and dtype == tl.bfloat16) else 1.0


@triton.jit
def power_against(scale: tl.tensor) -> tl.tensor:
    """Return the power of two that brings a positive scale into [1, 2), subnormal ones near it."""
    exponent = tl.minimum(scale.to(tl.int32, bitcast=True) >> 23, 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exact_exp(x: tl.tensor) -> tl.tensor:
    """Return exp(x) to about two units in the last place, 0 below -87.7 and infinity above 88.4.

    tl.exp rounds x * log2(e) once, which costs |x| / 2 units; here the reduction is exact. The
    power of two is made of bits: a second tl.exp2 takes 5 instructions more of 40 an element.
    """
    x = tl.minimum(x, MOST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    x = tl.maximum(x, LEAST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    shifted = tl.fma(x, LOG2_E, EXPONENT_MAGIC)
    part = tl.fma(x, LOG2_E, -(shifted - EXPONENT_MAGIC))
    part = tl.fma(x, LOG2_E_REST, part)
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.exp2(part) * power


@triton.jit
def activate(x: tl.tensor, alpha, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Return f(x) in fp32; silu is x * sigmoid(alpha * x).

    gelu_tanh: 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2 * y)). The quotients are Triton's own, within
    two units in the last place; an IEEE one takes a branch an element in the epilogue of a tile.
    """
    if ACTIVATION == "silu":
        return x / (1.0 + exact_exp(-alpha * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * INV_SQRT_2))
    elif ACTIVATION == "gelu_tanh":
        cubic = tl.fma(x * x * x, GELU_CUBIC, x)
        return x / (1.0 + exact_exp(cubic * MINUS_SQRT_8_OVER_PI))
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
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
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    value = activate(gate, alpha, ACTIVATION)
    return value * (up + beta) if GATED else value
