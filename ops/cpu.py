"""The plain CPU kernel: contributions grouped by expert, exact integer products from fp32 ones.

Only one expert's weights are in floating point at a time. Bits equal those of reference.py for
"token" and "static".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat import cpu_matmul_rounds_inputs
from .activation import apply_gate
from .arguments import ExpertsArguments, with_finite_limit
from .quantize import quantize_activations, row_scale
from .routing import local_experts

# 128 * 127 * 1024 < 2**24: sums of this many products are exact in fp32, in any order.
EXACT_CHUNK = 1024


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """Return the exact int32 product ``codes[m,K] @ weight[N,K].T`` of int8 matrices."""
    total: Tensor | None = None
    for start in range(0, codes.shape[1], EXACT_CHUNK):
        part = slice(start, start + EXACT_CHUNK)
        chunk = (codes[:, part].float() @ weight[:, part].float().t()).to(torch.int32)
        total = chunk if total is None else total.add_(chunk)
    assert total is not None, "a product over no columns passed the argument checks"
    return total


def float_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x[m,K] @ weight[N,K].T`` summed in fp32 for float x and int8 weight.

    Where the user allows reduced fp32 precision in matrix products, fp64 keeps ours exact.
    """
    exact = x.dtype == torch.bfloat16 or not cpu_matmul_rounds_inputs()
    dtype = torch.float32 if exact else torch.float64
    return (x.to(dtype) @ weight.to(dtype).t()).float()


class _Product:
    """Multiply rows of one expert after another by a quantised weight, and dequantise."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        if scale.dim() == weight.dim():
            scale = scale.squeeze(-1)
        self.weight = weight
        self.scale = row_scale(scale, weight.shape[1])
        self.bias = bias

    def __call__(self, expert: int, rows: Tensor, row_scales: Tensor | None) -> Tensor:
        """Return fp32 [m, N] for rows [m, K]: int8 codes with scales [m, 1], or floats."""
        weight = self.weight[expert]
        if row_scales is None:
            result = float_product(rows, weight).mul_(self.scale[expert])
        else:
            result = integer_product(rows, weight).float()
            result.mul_(row_scales * self.scale[expert])
        if self.bias is not None:
            result.add_(self.bias[expert].float())
        return result


def _quantized_rows(call: ExpertsArguments, live: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what enters w13: codes [T,H] and scales [T,1] or [1,1], or floats and None."""
    x = call.hidden_states
    if x.dtype == torch.int8:
        assert call.a13_scale is not None, "int8 rows without a scale passed the checks"
        return x, call.a13_scale.reshape(-1, 1)
    if call.apply_router_weight_on_input:
        weight = torch.where(live, call.topk_weights.float(), 0.0)
        x = torch.where(live, x.float() * weight, 0.0)
    if call.activation_quant == "none":
        return x.to(call.hidden_states.dtype), None
    return quantize_activations(x, call.activation_quant, call.a13_scale)


def experts(call: ExpertsArguments) -> Tensor:
    """Compute int8moe::experts on CPU. Arguments are already checked."""
    if torch.is_autocast_enabled("cpu"):
        # the products below are exact in fp32 only; the ambient autocast would make them bf16
        with torch.autocast("cpu", enabled=False):
            return experts(call)
    call = with_finite_limit(call)
    tokens, hidden = call.hidden_states.shape
    top_k = call.topk_ids.shape[1]
    dtype = call.result_dtype
    local = local_experts(call.topk_ids, call.w13.shape[0], call.expert_map)
    contributions = torch.zeros((tokens * top_k, hidden), dtype=dtype, device=local.device)
    if bool((local >= 0).any()):
        _fill_contributions(call, local, contributions)
    total = torch.zeros((tokens, hidden), dtype=torch.float32, device=local.device)
    for slot in range(top_k):
        total += contributions.view(tokens, top_k, hidden)[:, slot]
    return total.to(dtype)


def _fill_contributions(call: ExpertsArguments, local: Tensor, contributions: Tensor) -> None:
    top_k, dtype = local.shape[1], call.result_dtype
    flat = local.flatten()
    order = torch.argsort(flat, stable=True)
    order = order[flat[order] >= 0]
    ids, counts = torch.unique_consecutive(flat[order], return_counts=True)
    groups = list(zip(ids.tolist(), order.split(counts.tolist()), strict=True))

    up = _Product(call.w13, call.w13_scale, call.w13_bias)
    down = _Product(call.w2, call.w2_scale, call.w2_bias)
    rows, scales = _quantized_rows(call, local >= 0)
    router = None if call.apply_router_weight_on_input else call.topk_weights.float().flatten()

    def intermediate(expert: int, group: Tensor) -> Tensor:
        token = group // top_k
        shared = scales is None or scales.shape[0] == 1
        product = up(expert, rows[token], scales if shared else scales[token])  # type: ignore[index]
        return apply_gate(
            product,
            activation=call.activation,
            alpha=call.alpha,
            beta=call.beta,
            limit=call.limit,
            gated=call.gated,
        ).to(dtype)

    def finish(expert: int, group: Tensor, codes: Tensor, row_scales: Tensor | None) -> None:
        result = down(expert, codes, row_scales)
        if router is not None:
            result.mul_(router[group].unsqueeze(-1))
        contributions[group] = result.to(dtype)

    if call.activation_quant == "tensor":
        # the one scale needs every live row first
        parts = torch.cat([intermediate(expert, group) for expert, group in groups])
        codes, scale = quantize_activations(parts, "tensor")
        sizes = [group.numel() for _, group in groups]
        for (expert, group), part in zip(groups, codes.split(sizes), strict=True):
            finish(expert, group, part, scale)
        return
    for expert, group in groups:
        h = intermediate(expert, group)
        if call.activation_quant == "none":
            finish(expert, group, h, None)
        else:
            finish(expert, group, *quantize_activations(h, call.activation_quant, call.a2_scale))
