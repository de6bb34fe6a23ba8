"""Eager CUDA calls of int8moe::experts: some Triton launches and no synchronisation.

T tokens, H hidden, I intermediate, E local experts, K experts per token. Arguments are checked.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ..ops.arguments import ExpertsArguments
from ..oracle import DeviceFacts
from . import eager_kernels as kernels
from . import routing, tiles, variants
from .launches import empty, launch, zeros

# Columns that one program of the combination takes.
COMBINE_BLOCK = 1024


@dataclass(frozen=True)
class Rows:
    """Carry activations entering a product: codes or floats, and their scale, if any."""

    values: Tensor
    scale: Tensor | None

    @property
    def has_row_scale(self) -> bool:
        """Say whether each row has its own scale."""
        return self.scale is not None and self.scale.numel() > 1


def experts(call: ExpertsArguments) -> Tensor:
    """Compute int8moe::experts on the device of its tensors, whatever the current one is."""
    x, contributions = call.hidden_states, call.topk_ids.numel()
    if contributions == 0 or call.w13.shape[0] == 0:
        return torch.zeros(x.shape, dtype=call.result_dtype, device=x.device)
    variant = variants.forced_variant(contributions) or layer_variant(call)
    with device_of(x):
        if variant.name != "apart":
            from . import eager_variants

            computed = eager_variants.experts(call, variant)
            if computed is not None:
                return computed
            variant = apart_variant(call)
        up, down = variant.up, variant.down
        plan = routing.plan(
            call.topk_ids, call.expert_map, num_experts=call.w13.shape[0], block_m=up.block_m
        )
        rows = first_rows(call, plan)
        middle = launch_up(call, plan, rows, up)
        rows = second_rows(call, plan, middle)
        return combine(call, launch_down(call, plan, rows, down), plan)


def combine(call: ExpertsArguments, parts: Tensor, plan: routing.Plan, **options: Any) -> Tensor:
    """Return the sum [T, H] of contributions [T*K, H]."""
    output = empty(call.hidden_states.shape, parts.dtype, parts.device)
    tokens, hidden = output.shape
    launch(
        kernels.combine_kernel,
        tokens * triton.cdiv(hidden, COMBINE_BLOCK),
        output,
        parts,
        plan.local,
        hidden,
        parts.shape[0] // tokens,
        COMBINE_BLOCK,
        **options,
    )
    return output


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's device the current one: Triton launches there."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


@functools.cache
def facts_of(device: torch.device) -> DeviceFacts:
    """Return a device's facts, read once."""
    return DeviceFacts.of(device)


Sizes = tuple[int, int, tuple[int, ...], bool, int, int]


def _sizes(call: ExpertsArguments) -> Sizes:
    """Return what both products of a call depend on, as _products takes it."""
    is_float = call.activation_quant == "none"
    return (
        call.topk_ids.numel(),
        call.topk_ids.shape[1],
        tuple(call.w13.shape),
        call.gated,
        call.hidden_states.element_size() if is_float else 1,
        call.result_dtype.itemsize if is_float else 1,
    )


def _products(
    contributions: int,
    top_k: int,
    w13_shape: tuple[int, ...],
    gated: bool,
    up_bytes: int,
    down_bytes: int,
) -> tuple[tiles.Product, tiles.Product]:
    num_experts, rows, hidden = w13_shape
    panels = 2 if gated else 1
    width = rows // panels
    up = tiles.Product(contributions, num_experts, hidden, width, panels, up_bytes, top_k)
    down = tiles.Product(contributions, num_experts, width, hidden, 1, down_bytes, top_k)
    return up, down


def layer_products(call: ExpertsArguments) -> tuple[tiles.Product, tiles.Product]:
    """Return both products of a call."""
    return _products(*_sizes(call))


def layer_variant(call: ExpertsArguments) -> variants.Variant:
    """Return the kernels of a call by its sizes; what else it has may keep them from taking it."""
    return _layer_variant(_sizes(call), call.hidden_states.device, False)


def apart_variant(call: ExpertsArguments) -> variants.Variant:
    """Return the kernels that take every call."""
    return _layer_variant(_sizes(call), call.hidden_states.device, True)


@functools.lru_cache(maxsize=4096)
def _layer_variant(sizes: Sizes, device: torch.device, is_apart: bool) -> variants.Variant:
    pair = _products(*sizes)
    if is_apart:
        return variants.Variant("apart", *tiles.choose_pair(*pair, facts_of(device)))
    return variants.choose(*pair, facts_of(device), variants.Features())


def first_rows(call: ExpertsArguments, plan: routing.Plan) -> Rows:
    """Return what enters w13: codes with scales, or floats for weight-only experts."""
    x = call.hidden_states
    if x.dtype == torch.int8:
        assert call.a13_scale is not None, "int8 hidden_states passed the checks without a scale"
        return Rows(x, call.a13_scale.contiguous())
    weight = call.topk_weights if call.apply_router_weight_on_input else None
    if call.activation_quant != "none":
        return quantize(x, call.activation_quant, call.a13_scale, plan, weight=weight)
    if weight is None:
        return Rows(x, None)
    weighted = empty(x.shape, x.dtype, x.device)
    block = tiles.row_block(*x.shape)
    launch(
        kernels.weight_rows_kernel,
        triton.cdiv(x.shape[0], block.rows),
        weighted,
        x,
        weight,
        plan.local,
        *x.shape,
        *x.stride(),
        weight.stride(0),
        block.rows,
        block.columns,
        num_warps=block.num_warps,
    )
    return Rows(weighted, None)


def second_rows(call: ExpertsArguments, plan: routing.Plan, middle: Tensor) -> Rows:
    """Return what enters w2, quantised again from the rounded intermediate."""
    if call.activation_quant == "none":
        return Rows(middle, None)
    return quantize(middle, call.activation_quant, call.a2_scale, plan, is_middle=True)


def quantize(
    x: Tensor,
    quant: str,
    static_scale: Tensor | None,
    plan: routing.Plan,
    *,
    weight: Tensor | None = None,
    is_middle: bool = False,
) -> Rows:
    """Quantise rows of floats; of the intermediate only as many as there are live contributions."""
    rows, columns = x.shape
    block = tiles.row_block(rows, columns)
    codes = empty((rows, columns), torch.int8, x.device)
    # A pointer that is not read must still be one.
    weights, weight_stride = (x, 0) if weight is None else (weight, weight.stride(0))
    source = (x, weights, plan.tiles, plan.local)
    sizes = (rows, columns, *x.stride(), weight_stride)
    options: dict[str, Any] = {
        "HAS_WEIGHT": weight is not None,
        "HAS_LIVE": is_middle,
        "ROWS": block.rows,
        "BLOCK": block.columns,
        "num_warps": block.num_warps,
    }
    programs = triton.cdiv(rows, block.rows)
    given, scale = static_scale, static_scale
    if quant == "tensor":
        given = zeros((1,), torch.int32, x.device)
        scale = empty((1,), torch.float32, x.device)
        launch(kernels.amax_kernel, programs, given, *source, *sizes, **options)
    elif quant == "token":
        scale = empty((rows,), torch.float32, x.device)
        given = scale
    assert scale is not None, "static experts passed the checks without a scale"
    launch(
        kernels.quantize_kernel,
        programs,
        codes,
        scale,
        x,
        given,
        *source[1:],
        *sizes,
        QUANT=quant,
        ONE_BLOCK=columns <= block.columns,
        **options,
    )
    return Rows(codes, scale)


def flat_scale(scale: Tensor, weight: Tensor) -> Tensor:
    """Return a weight scale as contiguous [E, columns]."""
    if scale.dim() == weight.dim():
        scale = scale.squeeze(-1)
    return scale.contiguous()


def scale_columns(columns: int, rows: int) -> str:
    """Name how a scale of so many columns belongs to a weight of so many rows."""
    if columns == rows:
        return "channel"
    return "tensor" if columns == 1 else "halves"


def launch_up(call: ExpertsArguments, plan: routing.Plan, rows: Rows, tile: tiles.Tile) -> Tensor:
    """Run the first product; returns [T*K, I] by position, in the result dtype."""
    w13, width = call.w13, call.intermediate_size
    middle = empty((plan.contributions, width), call.result_dtype, w13.device)
    scale = flat_scale(call.w13_scale, w13)
    bias = call.w13_bias
    launch(
        kernels.up_kernel,
        plan.tile_bound * triton.cdiv(width, tile.block_n),
        middle,
        rows.values,
        rows.scale,
        w13,
        scale,
        None if bias is None else bias.contiguous(),
        plan.order,
        plan.tiles,
        call.topk_ids.shape[1],
        w13.shape[2],
        width,
        *rows.values.stride(),
        w13.stride(0),
        w13.stride(1),
        width * w13.stride(1),
        float(call.alpha),
        float(call.beta),
        0.0 if call.limit is None else float(call.limit),
        ACTIVATION=call.activation,
        GATED=call.gated,
        HAS_BIAS=bias is not None,
        HAS_LIMIT=call.limit is not None,
        INTEGER=rows.scale is not None,
        PACKED=tiles.packs_codes(facts_of(rows.values.device), rows.values.element_size()),
        HAS_ROW_SCALE=rows.has_row_scale,
        SCALE_COLUMNS=scale_columns(scale.shape[1], w13.shape[1]),
        **_launch_options(tile, w13.shape[2]),
    )
    return middle


def launch_down(call: ExpertsArguments, plan: routing.Plan, rows: Rows, tile: tiles.Tile) -> Tensor:
    """Run the second product; returns [T*K, H] by contribution, in the result dtype."""
    w2, weights, bias = call.w2, call.topk_weights, call.w2_bias
    hidden, width = w2.shape[1], w2.shape[2]
    parts = empty((plan.contributions, hidden), call.result_dtype, w2.device)
    scale = flat_scale(call.w2_scale, w2)
    launch(
        kernels.down_kernel,
        plan.tile_bound * triton.cdiv(hidden, tile.block_n),
        parts,
        rows.values,
        rows.scale,
        w2,
        scale,
        None if bias is None else bias.contiguous(),
        weights,
        plan.order,
        plan.tiles,
        weights.shape[1],
        width,
        hidden,
        rows.values.stride(0),
        w2.stride(0),
        w2.stride(1),
        *weights.stride(),
        HAS_BIAS=bias is not None,
        HAS_ROUTER_WEIGHT=not call.apply_router_weight_on_input,
        INTEGER=rows.scale is not None,
        PACKED=tiles.packs_codes(facts_of(rows.values.device), rows.values.element_size()),
        HAS_ROW_SCALE=rows.has_row_scale,
        SCALE_COLUMNS=scale_columns(scale.shape[1], hidden),
        **_launch_options(tile, width),
    )
    return parts


def _launch_options(tile: tiles.Tile, depth: int) -> dict[str, Any]:
    """Spell a tile as the kernels' compile-time arguments."""
    return {
        "EVEN_K": depth % tile.block_k == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
