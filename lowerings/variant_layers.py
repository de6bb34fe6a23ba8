"""The layers of variants.py as launches, once for eager calls and graphs.

T tokens, H hidden, I intermediate, E local experts, K experts per token. A host makes buffers and
launches kernels: with tensors at once, or as nodes of Inductor's graph. So the tensors and sizes
here are a host's own.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from . import decode_kernels, decode_tiles, fused_kernels, tiles, variant_rows, variants
from .tiles import Tile, tile_bound


class Host(Protocol):
    """Make buffers and launch kernels for one call on one device."""

    call: Any
    dtype: torch.dtype
    # Kernels start before those ahead have ended, see dependent_launch.py.
    is_early: bool

    def size(self, x: Any) -> list[Any]:
        """Return a tensor's sizes."""

    def strides(self, x: Any) -> list[Any]:
        """Return a tensor's strides."""

    def empty(self, *size: Any, dtype: torch.dtype) -> Any:
        """Return a buffer that kernels write."""

    def contiguous(self, x: Any) -> Any:
        """Return a tensor without gaps."""

    def panels(self, x: Any, panels: int) -> Any:
        """Return a weight as [E * panels, N / panels, depth]; gate and up are panels."""

    def scale(self, x: Any) -> Any:
        """Return a weight scale as contiguous [E, columns]."""

    def descriptor(self, x: Any, block: list[int]) -> Any:
        """Return what a kernel reads a tensor by, in blocks."""

    def launch(self, kernel: Any, programs: Any, arguments: dict[str, Any], tile: Tile) -> None:
        """Launch so many programs of a kernel."""

    def operate(self, operator: Any, *args: Any) -> None:
        """Call an operator of lowerings/wgmma.py or stream.py."""

    def cdiv(self, a: Any, b: int) -> Any:
        """Return a / b, rounded up."""

    def minimum(self, a: Any, b: Any) -> Any:
        """Return the smaller size."""

    def multiprocessors(self) -> int:
        """Return how many multiprocessors the device has."""

    def code_arithmetic(self, x: Any) -> dict[str, bool]:
        """Say what there is for codes beside x, as decode_products.row_sums has it."""

    def is_old(self, *tensors: Any) -> bool:
        """Say whether tensors were there before the first launch of the call."""

    def column_name(self, scale: Any, weight: Any) -> str:
        """Return how a scale belongs to its weight."""


def fused(host: Host, variant: variants.Variant, plan: Any, rows: Any | None) -> Any:
    """Launch both products; returns [T*K, H] by contribution, for the sum.

    rows: (values, scale, whether it has one for each row) by token; None: put them into order.
    """
    if rows is None:
        rows = variant_rows.spread(host, plan)
    if variant.up.loads == "stream":
        from . import stream

        return stream.products(host, plan, rows, variant)
    codes, scale = first_product(host, plan, rows, variant.up), host.call.a2_scale
    is_token = host.call.activation_quant == "token"
    if is_token:
        middle = codes
        codes = host.empty(*host.size(middle), dtype=torch.int8)
        scale = host.empty(host.size(middle)[0], dtype=torch.float32)
        variant_rows.requantize(host, middle, codes, scale, plan.tiles)
    return second_product(host, plan, codes, scale, is_token, variant.down)


def scale_and_bias(host: Host, name: str) -> tuple[Any, Any | None]:
    """Return a weight's scale [E, columns] and its bias, if it has one, without gaps."""
    bias = getattr(host.call, f"{name}_bias")
    scale = host.scale(getattr(host.call, f"{name}_scale"))
    return scale, None if bias is None else host.contiguous(bias)


def _weight(host: Host, name: str, tile: Tile) -> dict[str, Any]:
    """Return the arguments that stand for a weight, its scale and its bias."""
    call = host.call
    weight = getattr(call, name)
    scale, bias = scale_and_bias(host, name)
    strides = host.strides(weight)
    operand = weight
    if tile.loads != "pointers":
        panels = 2 if name == "w13" and call.gated else 1
        operand = host.descriptor(host.panels(weight, panels), [panels, tile.block_n, tile.block_k])
    return {
        "w": operand,
        "w_scale_ptr": scale,
        "bias_ptr": bias,
        "stride_we": strides[0],
        "stride_wn": strides[1],
        "HAS_BIAS": bias is not None,
        "SCALE_COLUMNS": host.column_name(scale, weight),
    }


def _gate(call: Any) -> dict[str, Any]:
    return {
        "ALPHA": float(call.alpha),
        "BETA": float(call.beta),
        "LIMIT": 0.0 if call.limit is None else float(call.limit),
        "ACTIVATION": call.activation,
        "GATED": call.gated,
        "HAS_LIMIT": call.limit is not None,
    }


def _blocks(tile: Tile, depth: int) -> dict[str, Any]:
    return {
        "LOADS": tile.loads,
        "PERSISTENT": tile.programs > 0,
        "FLATTEN": tile.is_flat,
        "PARTS": 2 if tile.has_tail else 1,
        "EVEN_K": depth % tile.block_k == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
    }


def _described_rows(host: Host, rows: Any, tile: Tile) -> dict[str, Any]:
    """Return the descriptors of rows in expert order: whole tiles, and half ones where wanted."""
    described = {"a": host.descriptor(rows, [tile.block_m, tile.block_k])}
    if tile.has_tail:
        described["a_half"] = host.descriptor(rows, [tile.block_m // 2, tile.block_k])
    return described


def tiles_of(host: Host, contributions: Any, experts: int, width: int, tile: Tile) -> Any:
    """Return how many tiles of rows and columns a product can have."""
    ops = {"minimum": host.minimum, "cdiv": host.cdiv}
    rows = tile_bound(contributions, experts, tile.block_m, **ops)
    return rows * tiles.ceil_div(width, tile.block_n)


def programs_of(host: Host, contributions: Any, experts: int, width: int, tile: Tile) -> Any:
    """Return how many programs to launch: one a tile at most, or as many as stay resident."""
    bound = tiles_of(host, contributions, experts, width, tile)
    if tile.programs == 0:
        return bound
    return host.minimum(bound, tile.programs * host.multiprocessors())


def first_product(host: Host, plan: Any, rows: Any, tile: Tile) -> Any:
    """Launch the first product; returns its result [T*K, I] by position: codes by a given scale."""
    if tile.loads == "async":
        from . import wgmma

        return wgmma.first_product(host, plan, rows, tile)
    call = host.call
    values, scale, is_per_row = rows
    tokens, top_k = host.size(call.topk_ids)
    experts, w_rows, depth = host.size(call.w13)
    width = w_rows // 2 if call.gated else w_rows
    stride_am, stride_ak = host.strides(values)
    contributions = tokens * top_k
    is_static = call.activation_quant == "static"
    out = host.empty(contributions, width, dtype=torch.int8 if is_static else host.dtype)
    weight = _weight(host, "w13", tile)
    arguments = {
        "out_ptr": out,
        "code_scale_ptr": call.a2_scale,
        "a": values,
        "a_half": None,
        "a_scale_ptr": scale,
        **weight,
        "order_ptr": plan.order,
        "tiles_ptr": plan.tiles,
        "w_ptr": call.w13,
        "num_experts": experts,
        "top_k": top_k,
        "depth": depth,
        "width": width,
        "stride_am": stride_am,
        "stride_ak": stride_ak,
        "up_offset": width * weight["stride_wn"],
        **_gate(call),
        "HAS_ROW_SCALE": is_per_row,
        "DTYPE": str(host.dtype).removeprefix("torch."),
        "IS_STATIC": is_static,
        "LINES": variants.lines_ahead(host.is_early, contributions, experts),
        **_blocks(tile, depth),
    }
    if tile.loads == "both":
        arguments |= _described_rows(host, values, tile)
    programs = programs_of(host, contributions, experts, width, tile)
    host.launch(fused_kernels.fused_up_kernel, programs, arguments, tile)
    return out


def second_product(
    host: Host, plan: Any, codes: Any, scale: Any, is_per_row: bool, tile: Tile
) -> Any:
    """Launch the second product."""
    if tile.loads == "async":
        from . import wgmma

        return wgmma.second_product(host, plan, codes, scale, is_per_row, tile)
    call = host.call
    tokens, top_k = host.size(call.topk_ids)
    experts, width, depth = host.size(call.w2)
    stride_rt, stride_rk = host.strides(call.topk_weights)
    contributions = tokens * top_k
    parts = host.empty(contributions, width, dtype=host.dtype)
    arguments = {
        "out_ptr": parts,
        "a": codes,
        "a_half": None,
        "a_scale_ptr": scale,
        **_weight(host, "w2", tile),
        "weights_ptr": call.topk_weights,
        "order_ptr": plan.order,
        "tiles_ptr": plan.tiles,
        "w_ptr": call.w2,
        "top_k": top_k,
        "depth": depth,
        "width": width,
        "stride_am": depth,
        "stride_rt": stride_rt,
        "stride_rk": stride_rk,
        "HAS_ROUTER_WEIGHT": not call.apply_router_weight_on_input,
        "HAS_ROW_SCALE": is_per_row,
        "LINES": variants.lines_ahead(host.is_early),
        **_blocks(tile, depth),
    }
    if tile.loads == "both":
        arguments |= _described_rows(host, codes, tile)
    programs = programs_of(host, contributions, experts, width, tile)
    host.launch(fused_kernels.fused_down_kernel, programs, arguments, tile)
    return parts


def decode(host: Host, variant: variants.Variant, rows: Any | None) -> Any:
    """Launch a layer of few contributions; returns [T, H].

    rows: (codes or floats, scale, whether it has one for each row) by token, contiguous; None: made
    here.
    """
    call = host.call
    tokens, top_k = host.size(call.topk_ids)
    contributions = tokens * top_k
    experts = host.size(call.w13)[0]
    stride_it, stride_ik = host.strides(call.topk_ids)
    known = call.expert_map
    routed = {
        "ids_ptr": call.topk_ids,
        "map_ptr": None if known is None else host.contiguous(known),
        "num_contributions": contributions,
        "num_experts": experts,
        "map_size": 0 if known is None else host.size(known)[0],
        "stride_it": stride_it,
        "stride_ik": stride_ik,
        "HAS_MAP": known is not None,
        "INTEGER": call.activation_quant != "none",
    }
    if rows is None and call.activation_quant == "none":
        rows = host.contiguous(call.hidden_states), None, False
    elif rows is None:
        rows = variant_rows.codes(host, host.contiguous(call.hidden_states), call.a13_scale)
    values, scale = _decode_up(host, variant.up, routed, rows), call.a2_scale
    if call.activation_quant == "token":
        values, scale, _ = variant_rows.codes(host, values, None)
    return _decode_down(host, variant.down, routed, values, scale)


def _decode_blocks(
    host: Host, values: Any, tile: Tile, known: tuple[Tile, ...], whole: Tile, depth: int
) -> tuple[Tile, dict[str, Any]]:
    """Return the tile of a product beside values, and the arguments that say how it goes.

    known: tiles for which the layouts are those that the tensor cores take; whole: the tile for
    others that are no whole rows, and where there are no tensor cores.
    """
    arithmetic = host.code_arithmetic(values)
    is_added = arithmetic["TENSOR_CORES"] and tile in known
    if not is_added and tile.block_k < whole.block_k:
        tile = whole
    blocks = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    is_even = depth % tile.block_k == 0
    return tile, {**arithmetic, "TENSOR_CORES": is_added, **blocks, "EVEN_K": is_even}


def _decode_up(host: Host, tile: Tile, routed: dict[str, Any], rows: Any) -> Any:
    call = host.call
    values, scale, is_per_row = rows
    _, w_rows, depth = host.size(call.w13)
    width = w_rows // 2 if call.gated else w_rows
    contributions = routed["num_contributions"]
    is_static = call.activation_quant == "static"
    out = host.empty(contributions, width, dtype=torch.int8 if is_static else host.dtype)
    whole = decode_tiles.whole_first(depth, 2 if call.gated else 1)
    known = decode_tiles.FLOAT_FIRST
    tile, blocks = _decode_blocks(host, values, tile, known, whole, depth)
    weight = _weight(host, "w13", tile)
    arguments = {
        "out_ptr": out,
        "code_scale_ptr": call.a2_scale,
        "a_ptr": values,
        "a_scale_ptr": scale,
        "w_ptr": weight.pop("w"),
        **weight,
        **routed,
        **blocks,
        "top_k": host.size(call.topk_ids)[1],
        "depth": depth,
        "width": width,
        "up_offset": width * weight["stride_wn"],
        **_gate(call),
        "HAS_ROW_SCALE": is_per_row,
        "DTYPE": str(host.dtype).removeprefix("torch."),
        "IS_STATIC": is_static,
        # Without codes this is the first launch, which itself may come early.
        "IS_OLD": routed["INTEGER"] and host.is_old(call.w13, call.topk_ids, routed["map_ptr"]),
    }
    programs = contributions * tiles.ceil_div(width, tile.block_n)
    host.launch(decode_kernels.decode_up_kernel, programs, arguments, tile)
    return out


def _decode_down(
    host: Host, tile: Tile, routed: dict[str, Any], values: Any, scale: Any | None
) -> Any:
    call = host.call
    tokens, top_k = host.size(call.topk_ids)
    _, width, depth = host.size(call.w2)
    stride_rt, stride_rk = host.strides(call.topk_weights)
    out = host.empty(tokens, width, dtype=host.dtype)
    slots = tiles.whole_slots(top_k)
    a_bytes = 1 if routed["INTEGER"] else host.dtype.itemsize
    whole = decode_tiles.whole_second(depth, slots, a_bytes)
    known = decode_tiles.float_second(slots)
    tile, blocks = _decode_blocks(host, values, tile, known, whole, depth)
    weight = _weight(host, "w2", tile)
    arguments = {
        "out_ptr": out,
        "a_ptr": values,
        "a_scale_ptr": scale,
        "w_ptr": weight.pop("w"),
        **weight,
        "weights_ptr": call.topk_weights,
        **routed,
        **blocks,
        "depth": depth,
        "width": width,
        "stride_rt": stride_rt,
        "stride_rk": stride_rk,
        "HAS_ROW_SCALE": call.activation_quant == "token",
        # The routing is older: the first product has waited for it.
        "IS_OLD": host.is_old(call.w2),
        "TOP_K": top_k,
        "SLOTS": slots,
    }
    programs = tokens * tiles.ceil_div(width, tile.block_n)
    host.launch(decode_kernels.decode_down_kernel, programs, arguments, tile)
    return out
