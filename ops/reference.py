"""The meaning of ``int8moe::experts`` in plain PyTorch: what every kernel is held to.

With ``precision=torch.float64`` everything between the pinned roundings (codes, the rounding of
the intermediate, of each contribution and of the result) is computed in fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .activation import apply_gate
from .arguments import ExpertsArguments, with_finite_limit
from .quantize import quantize_activations, row_scale
from .routing import local_experts


def experts(*args: Any, precision: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    """Compute int8moe::experts from its meaning, for arguments that the operator would accept.

    Takes the operator's arguments. Returns [T,H] of the result dtype (fp64 results are rounded
    to it, too).
    """
    call = with_finite_limit(ExpertsArguments(*args, **kwargs))
    local = local_experts(call.topk_ids, call.w13.shape[0], call.expert_map)
    live = local >= 0
    tokens, top_k = local.shape
    dtype = call.result_dtype

    rows, scales = _first_rows(call, live, precision)
    h = torch.zeros((tokens, top_k, call.intermediate_size), dtype=dtype, device=local.device)
    for expert in range(call.w13.shape[0]):
        token, slot = torch.where(local == expert)
        row_scales = None if scales is None else scales.expand(tokens, 1)[token]
        product = _product(rows[token], row_scales, call.w13[expert], precision)
        product = _dequantized(product, row_scales, call.w13, call.w13_scale, expert)
        if call.w13_bias is not None:
            product = product + call.w13_bias[expert].to(precision)
        h[token, slot] = apply_gate(
            product,
            activation=call.activation,
            alpha=call.alpha,
            beta=call.beta,
            limit=call.limit,
            gated=call.gated,
        ).to(dtype)

    h_rows, h_scales = _second_rows(call, h, live)
    contributions = torch.zeros(
        (tokens, top_k, call.w13.shape[2]), dtype=dtype, device=local.device
    )
    for expert in range(call.w2.shape[0]):
        token, slot = torch.where(local == expert)
        row_scales = None if h_scales is None else h_scales[token, slot]
        product = _product(h_rows[token, slot], row_scales, call.w2[expert], precision)
        product = _dequantized(product, row_scales, call.w2, call.w2_scale, expert)
        if call.w2_bias is not None:
            product = product + call.w2_bias[expert].to(precision)
        if not call.apply_router_weight_on_input:
            product = product * call.topk_weights[token, slot].to(precision).unsqueeze(-1)
        contributions[token, slot] = product.to(dtype)

    total = torch.zeros((tokens, call.w13.shape[2]), dtype=precision, device=local.device)
    for slot_index in range(top_k):
        total = total + contributions[:, slot_index].to(precision)
    return total.to(dtype)


def _first_rows(
    call: ExpertsArguments, live: Tensor, precision: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return what enters w13: [T,H] codes with fp32 scales [T,1] or [1,1], or floats and None."""
    x = call.hidden_states
    if x.dtype == torch.int8:
        assert call.a13_scale is not None
        return x, call.a13_scale.reshape(-1, 1)
    if call.apply_router_weight_on_input:
        # selected, not multiplied by 0: a skipped row and its weight may hold NaN
        x = torch.where(live, x.float() * call.topk_weights.float(), 0.0)
    if call.activation_quant == "none":
        return x.to(call.hidden_states.dtype), None
    return quantize_activations(x, call.activation_quant, call.a13_scale)


def _second_rows(call: ExpertsArguments, h: Tensor, live: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what enters w2: [T,K,I] codes with fp32 scales [T,K,1], or floats and None."""
    if call.activation_quant == "none":
        return h, None
    codes = torch.zeros(h.shape, dtype=torch.int8, device=h.device)
    scales = torch.ones((*live.shape, 1), dtype=torch.float32, device=h.device)
    if bool(live.any()):
        codes[live], live_scales = quantize_activations(
            h[live], call.activation_quant, call.a2_scale
        )
        scales[live] = live_scales.expand(int(live.sum()), 1)
    return codes, scales


def _product(
    rows: Tensor, row_scales: Tensor | None, weight: Tensor, precision: torch.dtype
) -> Tensor:
    """Return rows @ weight.T: exact for codes (every sum stays below 2**53), else in precision."""
    if row_scales is None:
        return rows.to(precision) @ weight.to(precision).t()
    return (rows.double() @ weight.double().t()).to(precision)


def _dequantized(
    product: Tensor, row_scales: Tensor | None, weight: Tensor, scale: Tensor, expert: int
) -> Tensor:
    if scale.dim() == weight.dim():
        scale = scale.squeeze(-1)
    columns = row_scale(scale, weight.shape[1])[expert].to(product.dtype)
    if row_scales is None:
        return product * columns
    return product * (row_scales.to(product.dtype) * columns)
