"""Run int8moe::humming_experts: humming-kernels' products, our kernels around them.

T tokens, H hidden, I intermediate, E local experts, K experts per token. Arguments are checked.
No synchronisation, but conversions and compilations where something is met for the first time.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..ops.arguments import ExpertsArguments
from . import eager, routing
from . import humming_kernels as kernels
from .humming_weights import Product, ProductSizes, Weight, converted_weight, product_of

# Columns that one program of the gate and of the sum takes.
BLOCK = 1024


@dataclass(frozen=True)
class Lists:
    """Hold the rows of every tile as humming reads them, see humming_kernels.lists_kernel."""

    rows: Tensor
    experts: Tensor
    count: Tensor


def experts(call: ExpertsArguments) -> Tensor:
    """Compute the layer on the device of its tensors, whatever the current one is."""
    if importlib.util.find_spec("humming") is None:
        raise ImportError(
            "int8moe::humming_experts needs humming-kernels: "
            'pip install "int8moe_compile[humming]"',
            name="humming",
        )
    x, contributions = call.hidden_states, call.topk_ids.numel()
    if contributions == 0 or call.w13.shape[0] == 0:
        return torch.zeros(x.shape, dtype=call.result_dtype, device=x.device)
    with eager.device_of(x):
        return _layer(call)


def _layer(call: ExpertsArguments) -> Tensor:
    dtype, top_k = call.result_dtype, call.topk_ids.shape[1]
    w13 = converted_weight("w13", call.w13, call.w13_scale, dtype)
    w2 = converted_weight("w2", call.w2, call.w2_scale, dtype)
    up, down = _product(call, call.w13), _product(call, call.w2)
    plan = _plan(call, up)
    lists = make_lists(plan, up.block_m)
    rows = eager.first_rows(call, plan)
    product = multiply(up, rows, w13, lists, call.w13.shape[1], top_k, dtype)
    middle = apply_gate(call, product, w13.channel_scale, plan.local)
    if down.block_m != up.block_m:
        lists = make_lists(_plan(call, down), down.block_m)
    rows = eager.quantize(middle, "token", None, plan)
    product = multiply(down, rows, w2, lists, call.w2.shape[1], 1, dtype)
    return combine(call, product, w2.channel_scale, plan.local)


def _product(call: ExpertsArguments, weight: Tensor) -> Product:
    device = call.hidden_states.device.index or 0
    outputs, columns = weight.shape[1:]
    sizes = ProductSizes(outputs, columns, weight.shape[0], call.result_dtype)
    return product_of(sizes, call.topk_ids.numel(), device)


def _plan(call: ExpertsArguments, product: Product) -> routing.Plan:
    return routing.plan(
        call.topk_ids,
        call.expert_map,
        num_experts=call.w13.shape[0],
        block_m=product.block_m,
    )


def make_lists(plan: routing.Plan, block_m: int) -> Lists:
    """Return the lists of a plan with tiles of so many rows."""

    def integers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=plan.local.device)

    lists = Lists(integers(plan.tile_bound * block_m), integers(plan.tile_bound), integers(1))
    kernels.lists_kernel[(plan.tile_bound,)](
        lists.rows,
        lists.experts,
        lists.count,
        plan.order,
        plan.tiles,
        plan.contributions,
        block_m,
        triton.next_power_of_2(block_m),
    )
    return lists


def multiply(
    product: Product,
    rows: eager.Rows,
    weight: Weight,
    lists: Lists,
    outputs: int,
    top_k: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return rows times the weights of their experts by contribution, [rows * top_k, outputs].

    Rows of contributions that do not count stay unwritten.
    """
    from humming import ops

    assert rows.scale is not None, "integer products have a scale a row"
    codes = rows.values.contiguous()
    out = torch.empty((codes.shape[0] * top_k, outputs), dtype=dtype, device=codes.device)
    ops.launch_kernel(
        configs=product.launch,
        inputs=codes,
        input_scale=rows.scale.reshape(-1, 1),
        outputs=out,
        weight=weight.codes,
        weight_scale=weight.expert_scale,
        sorted_ids=lists.rows,
        expert_ids=lists.experts,
        num_tokens_padded=lists.count,
        top_k=top_k,
    )
    return out


def apply_gate(call: ExpertsArguments, product: Tensor, scale: Tensor, local: Tensor) -> Tensor:
    """Return the activated intermediate [T*K, I]."""
    width = call.intermediate_size
    middle = torch.empty((local.shape[0], width), dtype=product.dtype, device=product.device)
    kernels.gate_kernel[(local.shape[0] * triton.cdiv(width, BLOCK),)](
        middle,
        product,
        scale,
        local,
        width,
        float(call.alpha),
        float(call.beta),
        0.0 if call.limit is None else float(call.limit),
        call.limit is not None,
        BLOCK,
    )
    return middle


def combine(call: ExpertsArguments, product: Tensor, scale: Tensor, local: Tensor) -> Tensor:
    """Return the weighted sum [T, H] of contributions [T*K, H]."""
    weights, width = call.topk_weights, product.shape[1]
    tokens, top_k = weights.shape
    out = torch.empty((tokens, width), dtype=product.dtype, device=product.device)
    kernels.sum_kernel[(tokens * triton.cdiv(width, BLOCK),)](
        out,
        product,
        scale,
        weights,
        local,
        width,
        *weights.stride(),
        top_k,
        not call.apply_router_weight_on_input,
        BLOCK,
    )
    return out
