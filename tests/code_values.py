"""Convert all 256 int8 codes as the weight-only products do, by a kernel of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from int8moe_compile.lowerings.tile_math import code_unit, codes_to_float


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
