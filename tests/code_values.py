"""Values between codes and floats: all 256 codes converted, rows of every significand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from int8moe_compile.lowerings.tile_math import code_unit, codes_to_float, exact_exp


@triton.jit
def codes_kernel(out_ptr, codes_ptr, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Store converted codes, times what packed ones lack."""
    at = tl.arange(0, BLOCK)
    value = codes_to_float(tl.load(codes_ptr + at), out_ptr.dtype.element_ty, PACKED)
    value = value.to(tl.float32) * code_unit(out_ptr.dtype.element_ty, PACKED)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty))


def converted(dtype: torch.dtype, device: str, *, is_packed: bool) -> torch.Tensor:
    """Return the codes -128 to 127 as floats of a dtype."""
    codes = torch.arange(-128, 128, dtype=torch.int8, device=device)
    out = torch.empty(256, dtype=dtype, device=device)
    codes_kernel[(1,)](out, codes, is_packed, 256, num_warps=1)
    return out


@triton.jit
def exp_kernel(out_ptr, x_ptr, count, BLOCK: tl.constexpr):
    """Store exp of each number."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, exact_exp(tl.load(x_ptr + at, at < count)), at < count)


def check_exponentials(device: str) -> None:
    """Hold exact_exp to fp64 from end to end, and beyond both."""
    x = torch.cat([torch.linspace(-87.0, 88.3, 40001), torch.linspace(-1.0, 1.0, 4001)]).to(device)
    out = torch.empty_like(x)
    exp_kernel[(triton.cdiv(len(x), 1024),)](out, x, len(x), 1024)
    wanted = x.double().exp()
    assert ((out.double() - wanted).abs() / wanted).max() < 3 * 2.0**-23
    far = torch.tensor([-88.0, -1e30, float("-inf"), 88.6, 1e30, float("inf"), float("nan")])
    out = torch.empty(len(far), device=device)
    exp_kernel[(1,)](out, far.to(device), len(far), 8)
    assert out[:6].tolist() == [0.0, 0.0, 0.0, *3 * [float("inf")]] and out[6].isnan()


def rows_of_every_significand(dtype: torch.dtype) -> torch.Tensor:
    """Return rows whose maxima are those of a binade, or far from 1, or not finite.

    Each holds values of all significands, through nine powers of two (fp16: six).
    """
    bits, powers = (8, 10) if dtype == torch.bfloat16 else (11, 7)
    some = torch.arange(1 << (bits - 1), 1 << bits, dtype=torch.float64) / (1 << (bits - 1))
    values = torch.cat([some * 2.0**-power for power in range(powers)])
    values = torch.cat([values, -values])[None, :]
    x = torch.maximum(torch.minimum(values, some[:, None]), -some[:, None])
    x[:, 0] = some
    far = [2.0**-110, 2.0**110, 2.0**-130] if dtype == torch.bfloat16 else [2.0**-12, 2.0**14]
    x = torch.cat([x, *(x[-2:] * factor for factor in far), x[:3]]).to(dtype)
    x[-3, 5], x[-2, 5], x[-1] = float("nan"), float("inf"), 0.0
    return x
