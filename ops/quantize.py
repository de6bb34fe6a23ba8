"""Symmetric INT8 quantisation: scales, codes and the way back, for weights and activations."""

from __future__ import annotations

import torch
from torch import Tensor

QMAX = 127.0
ACTIVATION_MIN = -128.0
WEIGHT_MIN = -127.0


def scale_of(amax: Tensor) -> Tensor:
    """Return the fp32 scale ``amax / 127``, and 1 where that quotient is 0.

    The test is on the quotient: an amax below 127 times the smallest fp32 divides to 0, too.
    """
    amax = amax.to(torch.float32)
    # by a tensor: ATen on CUDA turns a division by a Python number into one by its reciprocal
    scale = amax / torch.full_like(amax, QMAX)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def encode(x: Tensor, scale: Tensor, low: float) -> Tensor:
    """Return int8 codes ``round_half_even(x / scale)`` clamped to [low, 127]; NaN becomes 0."""
    codes = torch.round(x.to(torch.float32) / scale).clamp(low, QMAX)
    return torch.nan_to_num(codes, nan=0.0).to(torch.int8)


def quantize_activations(
    x: Tensor, activation_quant: str, static_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise rows [R, C] of float activations.

    activation_quant: "token" (one scale a row), "tensor" (one over all rows given) or "static"
    (static_scale, one value). Returns int8 codes [R, C] and fp32 scales [R, 1] or [1, 1].
    """
    if activation_quant == "static":
        assert static_scale is not None, "the argument checks let a static call through unscaled"
        scale = static_scale.to(torch.float32).reshape(1, 1)
    else:
        amax = x.abs().amax(dim=-1, keepdim=True)
        if activation_quant == "tensor":
            # amax refuses to reduce no rows at all; their scale is that of zeros
            amax = amax.amax(dim=0, keepdim=True) if amax.shape[0] else amax.new_zeros(1, 1)
        scale = scale_of(amax)
    return encode(x, scale, ACTIVATION_MIN), scale


def quantize_weight(weight: Tensor, granularity: str = "channel") -> tuple[Tensor, Tensor]:
    """Quantise a weight [..., N, H] of any float dtype.

    granularity: "channel" gives scales [..., N], "tensor" [..., 1], "halves" [..., 2] (the first
    and second half of the N rows apart: gate and up). Codes are int8 [..., N, H] in
    [-127, 127], scales fp32. Raises ValueError for another word, an odd N with "halves", or
    values that are not finite.
    """
    rows = weight.shape[-2]
    amax = weight.abs().amax(dim=-1).to(torch.float32)
    if granularity == "tensor":
        amax = amax.amax(dim=-1, keepdim=True)
    elif granularity == "halves":
        if rows % 2:
            raise ValueError(f"weight: wanted an even number of rows for halves, got {rows}")
        amax = amax.unflatten(-1, (2, rows // 2)).amax(dim=-1)
    elif granularity != "channel":
        raise ValueError(
            f'granularity: wanted "channel", "tensor" or "halves", got {granularity!r}'
        )
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("weight: wanted finite values, got NaN or infinity")
    scale = scale_of(amax)
    return encode(weight, row_scale(scale, rows).unsqueeze(-1), WEIGHT_MIN), scale


def row_scale(scale: Tensor, rows: int) -> Tensor:
    """Spread a weight scale [..., rows], [..., 1] or [..., 2] to one value a row [..., rows].

    A scale of two values belongs to two halves of the rows. [..., 1] comes back as a view.
    """
    values = scale.shape[-1]
    if values == rows:
        return scale
    if values == 1:
        return scale.expand(*scale.shape[:-1], rows)
    assert values == 2, f"a scale of {values} values for {rows} rows passed the argument checks"
    halves = scale.unsqueeze(-1).expand(*scale.shape, rows // 2)
    return halves.reshape(*scale.shape[:-1], rows)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``codes * scale`` [..., N, H], multiplied in fp32 and rounded once to dtype."""
    if scale.dim() == codes.dim():
        scale = scale.squeeze(-1)
    spread = row_scale(scale, codes.shape[-2]).unsqueeze(-1)
    return (codes.to(torch.float32) * spread).to(dtype)
