"""One call of int8moe::experts in a CUDA graph: loop IR, routing, and templates or variants.

T tokens, H hidden, I intermediate, E local experts, K experts per token, N = 2*I when gated.
Arguments passed the fake's checks; weights are static in shape, T may be symbolic. ``call`` is an
ExpertsArguments whose tensors are Inductor's buffers, hence untyped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config, ir, lowering
from torch._inductor.virtualized import V

from ..ops.arguments import with_finite_limit
from ..oracle import DeviceFacts
from . import (
    bench_inputs,
    gpu_variants,
    row_ir,
    templates,
    tiles,
    variant_layers,
    variant_rows,
    variant_tables,
    variants,
)
from .eager import scale_columns
from .routing_ir import GraphPlan, is_between, likely_size, plan


@dataclass(frozen=True)
class Rows:
    """Carry activations entering a product: int8 codes with scales, or floats and None."""

    values: ir.TensorBox
    scale: ir.TensorBox | None
    is_scale_per_row: bool = False


@dataclass(frozen=True)
class Layer:
    """Hold what both products of one call share."""

    call: Any
    plan: GraphPlan
    dtype: torch.dtype
    up: tiles.Product
    down: tiles.Product
    device: DeviceFacts
    tiles: tuple[tiles.Tile, tiles.Tile]


def lower(call: Any) -> ir.TensorBox:
    """Lower one call on a CUDA device to loop IR and launches, by the kernels of its size."""
    call = with_finite_limit(call)
    hidden = call.hidden_states
    dtype = result_dtype(call)
    tokens, top_k = routing_size(call)
    if V.graph.sizevars.statically_known_equals(tokens * top_k, 0) or static(call.w13)[0] == 0:
        full = lowering.lowerings[torch.ops.aten.full.default]
        empty: ir.TensorBox = full(hidden.get_size(), 0, dtype=dtype, device=hidden.get_device())
        return empty
    up, down = products(call, dtype)
    device = DeviceFacts.of(hidden.get_device())
    is_sized = (tokens * top_k).is_number
    # Wrappers in C++ get the templates, whatever the size.
    is_scheduled = not is_sized and not V.graph.cpp_wrapper
    is_early = gpu_variants.starts_early(up.contributions, device)
    # Tiles that are compared are those of templates, which come before the tables at few rows.
    rows = tiles.rows_per_expert(up.contributions, up.experts)
    is_compared = is_tuned() and rows <= variant_tables.FEW_ROWS
    mode = {"is_sized": is_sized, "is_early": is_early and not is_compared}
    # Asking for the features realizes the weights and guards their strides: only where they count.
    asked = variants.asked_for(up, down, device, **mode)
    early = {"is_early": gpu_variants.starts_early(1, device)}
    scheduled_for = variants.asked_schedule(up, down, device, **early) if is_scheduled else None
    features = variants.Features()
    if asked is not None or scheduled_for is not None:
        features = gpu_variants.features_of(call)
    schedule = variants.schedule(up, down, device, features, **early) if is_scheduled else None
    if schedule is not None:
        return scheduled(call, dtype, up.experts, device, schedule)
    variant = variants.choose(up, down, device, features, **mode)
    if variant.name == "decode":
        return decoded(call, dtype, device, variant, up.contributions)
    is_fused = variant.name == "fused"
    block_m = variant.up.block_m
    routing = plan(
        call.topk_ids,
        call.expert_map,
        num_experts=up.experts,
        block_m=block_m,
        is_inverse_wanted=is_fused and variant.up.is_ordered,
        is_progress_wanted=variant.up.loads == "stream",
        is_early=is_fused and is_early,
    )
    if is_fused:
        parts = fused_parts(call, dtype, device, variant, up.contributions, routing)
    else:
        chosen = (variant.up, variant.down)
        parts = separate_parts(Layer(call, routing, dtype, up, down, device, chosen))
    # With one slot the sum would become an epilogue of the product, whose tiles hold live rows
    # only: the rows of tokens without an expert would stay unwritten.
    V.graph.no_fuse_buffer_names.add(parts.get_name())
    return row_ir.combine(parts, routing.local, hidden.get_size(), top_k)


def decoded(
    call: Any,
    dtype: torch.dtype,
    device: DeviceFacts,
    variant: variants.Variant,
    contributions: int,
) -> ir.TensorBox:
    """Lower a call of few tokens to kernels that need no routing and sum over slots themselves."""
    is_apart = quantises_apart(call)
    ready = gpu_variants.realized(call)
    host = gpu_variants.GraphHost(
        ready, dtype, device, contributions=contributions, is_first=is_apart
    )
    rows = None if is_apart else by_token(call, None)
    output: ir.TensorBox = variant_layers.decode(host, variant, rows)
    return output


def fused_parts(
    call: Any,
    dtype: torch.dtype,
    device: DeviceFacts,
    variant: variants.Variant,
    contributions: int,
    routing: GraphPlan,
) -> ir.TensorBox:
    """Return the contributions [T*K, H] by the kernels of a variant."""
    is_apart = quantises_apart(call)
    ready = gpu_variants.realized(call)
    host = gpu_variants.GraphHost(ready, dtype, device, contributions=contributions)
    if variant.up.is_ordered:
        rows = None
    elif is_apart:
        rows = variant_rows.codes(host, ready.hidden_states, ready.a13_scale)
    else:
        rows = by_token(call, routing.local)
    parts: ir.TensorBox = variant_layers.fused(host, variant, routing, rows)
    return parts


def scheduled(
    call: Any,
    dtype: torch.dtype,
    num_experts: int,
    device: DeviceFacts,
    schedule: variants.Schedule,
) -> ir.TensorBox:
    """Lower a call of any number of tokens: every variant's kernels, of which one's are launched.

    Fused ones share their buffers; one pointwise kernel reads what was written. Only a forced
    schedule has steps of "decode".
    """
    tokens, top_k = routing_size(call)
    ready = gpu_variants.realized(call)
    least = 0
    shared: dict[Any, Any] = {}
    decode: list[tuple[int, variants.Variant, gpu_variants.GraphHost]] = []
    fused: list[tuple[variants.Variant, GraphPlan, gpu_variants.GraphHost]] = []
    for most, variant in schedule.steps:
        is_wanted = is_between(tokens * top_k, least, most)
        least = most
        if variant.name == "decode":
            host = gpu_variants.GraphHost(
                ready, dtype, device, contributions=most, is_wanted=is_wanted
            )
            decode.append((most, variant, host))
            continue
        host = gpu_variants.GraphHost(
            ready, dtype, device, contributions=most, is_wanted=is_wanted, shared=shared
        )
        routing = plan(
            ready.topk_ids,
            call.expert_map,
            num_experts=num_experts,
            block_m=variant.up.block_m,
            is_inverse_wanted=variant.up.is_ordered,
            is_progress_wanted=variant.up.loads == "stream",
            is_wanted=is_wanted,
            empty=host.empty,
            is_early=host.is_early,
        )
        fused.append((variant, routing, host))
    # Quantised once for all that take rows by token, and after every routing, which it may read.
    local = fused[-1][1].local
    is_by_token = bool(decode) or any(not variant.up.is_ordered for variant, _, _ in fused)
    rows = by_token(call, local) if is_by_token else None
    decoded = [(most, variant_layers.decode(host, v, rows)) for most, v, host in decode]
    for variant, routing, host in fused:
        wanted = None if variant.up.is_ordered else rows
        parts = variant_layers.fused(host, variant, routing, wanted)
    return row_ir.combine(parts, local, call.hidden_states.get_size(), top_k, decoded)


def separate_parts(layer: Layer) -> ir.TensorBox:
    """Return the contributions [T*K, H]: both quantisations as loop IR, both products templates."""
    rows = first_rows(layer.call, layer.plan.local)
    middle = first_product(layer, rows)
    return second_product(layer, second_rows(layer, middle))


def quantises_apart(call: Any) -> bool:
    """Say whether a variant's own kernel quantises the tokens: where no loop is there to join.

    Nor one to read rows with gaps where they are. Behind that kernel the next one starts early: at
    1 token a layer takes 1 to 4 us less.
    """
    x = call.hidden_states
    is_alone = gpu_variants.lies_in_order(x) and not gpu_variants.joins_loop(x)
    return is_alone and variant_rows.takes(call, x.get_dtype(), static(call.w13)[2])


def by_token(call: Any, local: ir.TensorBox | None) -> tuple[Any, Any, bool]:
    """Return what enters w13 as variants' kernels take it: values, scale, whether one a row."""
    rows = first_rows(call, local)
    return rows.values, rows.scale, rows.is_scale_per_row


def is_tuned() -> bool:
    """Say whether the user has tiles compared by time."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def result_dtype(call: Any) -> torch.dtype:
    """Return the output dtype: the one asked for, the input's, or bf16 for int8 input."""
    if call.out_dtype is not None:
        asked: torch.dtype = call.out_dtype
        return asked
    given: torch.dtype = call.hidden_states.get_dtype()
    return torch.bfloat16 if given == torch.int8 else given


def static(x: Any) -> list[int]:
    """Return the sizes of a weight, which are static or are made so by a guard."""
    return [int(V.graph.sizevars.guard_int(size)) for size in x.get_size()]


def routing_size(call: Any) -> tuple[Any, int]:
    """Return T and K; K is a constant of the kernels, so that a symbolic one gets a guard."""
    tokens, top_k = call.topk_ids.get_size()
    return tokens, int(V.graph.sizevars.guard_int(top_k))


def products(call: Any, dtype: torch.dtype) -> tuple[tiles.Product, tiles.Product]:
    """Return both products of a call, at its likely size."""
    num_experts, rows, depth = static(call.w13)
    panels = 2 if call.gated else 1
    is_float = call.activation_quant == "none"
    tokens, top_k = routing_size(call)
    contributions = likely_size(tokens * top_k)
    bytes_up = call.hidden_states.get_dtype().itemsize if is_float else 1
    bytes_down = dtype.itemsize if is_float else 1
    width = rows // panels
    return (
        tiles.Product(contributions, num_experts, depth, width, panels, bytes_up, top_k),
        tiles.Product(contributions, num_experts, width, depth, 1, bytes_down, top_k),
    )


def first_rows(call: Any, local: ir.TensorBox | None) -> Rows:
    """Return what enters w13: quantised as loop IR that joins what computes hidden_states.

    local: the expert of each contribution [T*K], for a call with the router weight on its input.
    """
    x = call.hidden_states
    if x.get_dtype() == torch.int8:
        is_per_row = call.activation_quant == "token"
        return Rows(_realized(x), _flat(call.a13_scale), is_per_row)
    load = row_ir.rounded_loader(x)
    if call.apply_router_weight_on_input:
        assert local is not None, "weighted rows without the experts of their tokens"
        load = row_ir.weighted_loader(load, call.topk_weights, local)
    elif call.activation_quant == "none":
        return Rows(_realized(x), None)
    if call.activation_quant == "none":
        return Rows(row_ir.pointwise(x, x.get_dtype(), x.get_size(), load), None)
    return _quantized(x, load, call.activation_quant, call.a13_scale)


def second_rows(layer: Layer, middle: ir.TensorBox) -> Rows:
    """Return what enters w2, quantised again from the rounded intermediate."""
    call = layer.call
    if call.activation_quant == "none":
        return Rows(middle, None)
    load = row_ir.rounded_loader(middle)
    if call.activation_quant == "tensor":
        load = row_ir.live_row_loader(load, layer.plan.tiles)
    return _quantized(middle, load, call.activation_quant, call.a2_scale)


def _quantized(
    x: ir.TensorBox, load: row_ir.Loader, quant: str, static_scale: ir.TensorBox | None
) -> Rows:
    is_per_row = quant == "token"
    scale = static_scale
    if quant != "static":
        scale = row_ir.dynamic_scale(x, load, is_per_row=is_per_row)
    assert scale is not None, "static experts passed the checks without a scale"
    codes = row_ir.encode(x, load, scale, is_per_row=is_per_row)
    return Rows(codes, _flat(scale), is_per_row)


def first_product(layer: Layer, rows: Rows) -> ir.TensorBox:
    """Return [T*K, I] by position: products of tokens and w13, gated, in the result dtype."""
    call = layer.call
    meta = {
        "ALPHA": float(call.alpha),
        "BETA": float(call.beta),
        "LIMIT": 0.0 if call.limit is None else float(call.limit),
        "ACTIVATION": repr(call.activation),
        "GATED": call.gated,
        "HAS_LIMIT": call.limit is not None,
    }
    weight = (call.w13, call.w13_scale, call.w13_bias)
    return _product("up", layer, rows, weight, layer.up, layer.tiles[0], meta)


def second_product(layer: Layer, rows: Rows) -> ir.TensorBox:
    """Return [T*K, H] by contribution: products with w2, weighted, in the result dtype."""
    call = layer.call
    meta = {"HAS_ROUTER_WEIGHT": not call.apply_router_weight_on_input}
    extra = [] if call.apply_router_weight_on_input else [_realized(call.topk_weights)]
    weight = (call.w2, call.w2_scale, call.w2_bias)
    return _product("down", layer, rows, weight, layer.down, layer.tiles[1], meta, extra)


def _product(
    name: str,
    layer: Layer,
    rows: Rows,
    weight: tuple[ir.TensorBox, ir.TensorBox, ir.TensorBox | None],
    product: tiles.Product,
    tile: tiles.Tile,
    meta: dict[str, Any],
    extra: Sequence[ir.TensorBox] = (),
) -> ir.TensorBox:
    """Launch one template over its inputs, in the order in which its source names them."""
    codes, scale, bias = _realized(weight[0]), _flat_rows(weight[1]), weight[2]
    strides = [int(V.graph.sizevars.guard_int(s)) for s in codes.get_stride()]
    inputs = [_realized(rows.values)]
    inputs += [] if rows.scale is None else [rows.scale]
    inputs += [codes, scale]
    inputs += [] if bias is None else [ir.ExternKernel.require_contiguous(bias)]
    inputs += [*extra, layer.plan.order, layer.plan.tiles]
    tokens, top_k = routing_size(layer.call)
    shared = {
        "INTEGER": rows.scale is not None,
        "PACKED": tiles.packs_codes(layer.device, product.a_bytes),
        "HAS_ROW_SCALE": rows.is_scale_per_row,
        "HAS_BIAS": bias is not None,
        "SCALE_COLUMNS": repr(scale_columns(static(scale)[1], static(codes)[1])),
        "TOP_K": top_k,
        "DEPTH": product.depth,
        "WIDTH": product.width,
        "EXPERTS": product.experts,
        "STRIDE_WE": strides[0],
        "STRIDE_WN": strides[1],
    }
    found: Sequence[tiles.Tile] = (tile,)
    if is_tuned():
        found = tiles.candidates(product, layer.device, tile.block_m)
    return templates.product(
        name,
        inputs,
        [tokens * top_k, product.width],
        layer.dtype,
        found,
        {**meta, **shared},
        bench_inputs.generators(len(inputs), product, tile.block_m, top_k),
    )


def _realized(x: Any) -> Any:
    """Return a tensor as a buffer or a view of one, as templates take it."""
    return ir.ExternKernel.realize_input(x)


def _flat(scale: Any) -> Any:
    """Return activation scales as [values], contiguous."""
    values = 1
    for size in scale.get_size():
        values = values * size
    return ir.ExternKernel.require_contiguous(lowering.view(scale, [values]))


def _flat_rows(scale: Any) -> Any:
    """Return weight scales as contiguous [E, columns]."""
    return ir.ExternKernel.require_contiguous(lowering.view(scale, scale.get_size()[:2]))
