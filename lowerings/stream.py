"""Launch both products of a layer as one kernel, stream_kernels.py, which graphs call as operator.

T tokens, H hidden, I intermediate, E local experts, K experts per token. As in wgmma.py, whose
helpers these launches share.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from . import stream_kernels, stream_rows, stream_tiles, tiles, variant_layers, variants, wgmma
from .eager import device_of, scale_columns

# Registers a thread of twelve warps, of which two programs fit a multiprocessor; warps that
# quantise and that ask take so many of them, those that multiply what is left: 88 for tiles of few
# rows, 152 for others, whose sums are more.
REGISTERS: Final = 80
FEW_ROWS_REGISTERS: Final = {"QUANTIZING_REGISTERS": 112, "ASKING_REGISTERS": 40}
MORE_ROWS_REGISTERS: Final = {"QUANTIZING_REGISTERS": 64, "ASKING_REGISTERS": 24}
# Results of tiles of so many rows are the last to leave L2: else weights push them out before they
# are read. 0.4 to 2.7 % of a layer up to 24 rows an expert, 1 % at 32; at 64 Qwen3 lost 1 %, others
# gained as much. By the tile, not by bytes: a graph of any size prepares one kernel for each, and
# DeepSeek-V3, 1024 tokens, lost nothing with 117 MB.
KEPT_ROWS: Final = 64
# Codes of a row of weights, and rows of them, that come in one box.
BOX_K: Final = int(stream_tiles.BOX_K.value)
PANEL: Final = int(stream_tiles.PANEL.value)


def products(host: Any, plan: Any, rows: Any, variant: variants.Variant) -> Any:
    """Launch both products; returns [T*K, H] by contribution."""
    call = host.call
    values, scale, is_per_row = rows
    tokens, top_k = host.size(call.topk_ids)
    experts, hidden, width = host.size(call.w2)
    contributions = tokens * top_k
    is_static = call.activation_quant == "static"
    # In the order in which other variants' hosts ask for theirs.
    middle = host.empty(*((1,) if is_static else (contributions, width)), dtype=host.dtype)
    codes = host.empty(contributions, width, dtype=torch.int8)
    code_scale = host.empty(1 if is_static else contributions, dtype=torch.float32)
    parts = host.empty(contributions, hidden, dtype=host.dtype)
    most = [
        variant_layers.tiles_of(host, contributions, experts, size, tile)
        for size, tile in ((width, variant.up), (hidden, variant.down))
    ]
    resident = variant.up.programs * host.multiprocessors()
    host.operate(
        torch.ops.int8moe._stream.default,
        parts,
        middle,
        codes,
        code_scale,
        plan.progress,
        values,
        scale,
        call.w13,
        *variant_layers.scale_and_bias(host, "w13"),
        call.w2,
        *variant_layers.scale_and_bias(host, "w2"),
        plan.tiles,
        plan.order,
        call.topk_weights,
        call.a2_scale if is_static else None,
        is_per_row,
        call.activation,
        float(call.alpha),
        float(call.beta),
        None if call.limit is None else float(call.limit),
        not call.apply_router_weight_on_input,
        host.is_early,
        host.is_old(call.w13, call.w2),
        host.minimum(most[0] + most[1], resident),
        _numbers(variant),
    )
    return parts


def _numbers(variant: variants.Variant) -> list[int]:
    """Return tiles as the operator takes them: rows, stages, boxes, panels, group, warps."""
    up, down = variant.up, variant.down
    boxes, panels = 2 * up.block_k // BOX_K, down.block_n // PANEL
    return [up.block_m, up.num_stages, boxes, panels, up.group_m, up.num_warps]


class Layer(NamedTuple):
    """Carry one call of int8moe::_stream, in its schema's order.

    out [T*K, H] by contribution is the result of rows [T*K, H] in expert order. middle, codes
    [T*K, I] and code_scale [T*K] are scratch memory; the first and the last are not used with a
    given scale. progress: zeros, as stream_rows.py has them, which are used up. scale: one for each
    row if is_per_row, else one. programs: how many to launch. tile: as _numbers has it.
    """

    out: Tensor
    middle: Tensor
    codes: Tensor
    code_scale: Tensor
    progress: Tensor
    rows: Tensor
    scale: Tensor
    w13: Tensor
    w13_scale: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_bias: Tensor | None
    tile_list: Tensor
    order: Tensor
    topk_weights: Tensor
    given_scale: Tensor | None
    is_per_row: bool
    activation: str
    alpha: float
    beta: float
    limit: float | None
    is_weighted: bool
    is_early: bool
    is_old: bool
    programs: int
    tile: list[int]


def launch(*args: Any) -> None:
    """Launch a layer, or have it compiled where no program is due; arguments as in Layer."""
    layer = Layer(*args)
    if layer.programs == 0:
        sizes = (layer.w2.data_ptr(), layer.w2.shape, layer.w13_scale.shape, layer.w2_scale.shape)
        types = (layer.out.dtype, layer.topk_weights.dtype)
        given = (layer.w13_bias is None, layer.given_scale is None)
        # The numbers from is_per_row on, and the tile.
        if wgmma.is_idle(0, layer.w13, "stream", *sizes, *types, *given, *args[17:-2], *layer.tile):
            return
    stride_rt, stride_rk = layer.topk_weights.stride()
    is_static = layer.given_scale is not None
    with device_of(layer.out):
        wgmma.launch_or_prepare(
            stream_kernels.stream_kernel,
            layer.programs,
            out_ptr=layer.out,
            middle_ptr=layer.middle,
            codes_ptr=layer.codes,
            code_scale_ptr=layer.given_scale if is_static else layer.code_scale,
            a1_scale_ptr=layer.scale,
            w1_scale_ptr=layer.w13_scale,
            w1_bias_ptr=layer.w13_bias,
            w2_scale_ptr=layer.w2_scale,
            w2_bias_ptr=layer.w2_bias,
            weights_ptr=layer.topk_weights,
            order_ptr=layer.order,
            tiles_ptr=layer.tile_list,
            progress_ptr=layer.progress,
            stride_rt=stride_rt,
            stride_rk=stride_rk,
            **_constants(layer),
            **_operands(layer),
            **wgmma.timing(layer.is_early),
        )


def _constants(layer: Layer) -> dict[str, Any]:
    """Return what the kernel is compiled for beside its tile."""
    return {
        "TOP_K": layer.topk_weights.shape[1],
        "ALPHA": layer.alpha,
        "BETA": layer.beta,
        "LIMIT": 0.0 if layer.limit is None else layer.limit,
        "ACTIVATION": layer.activation,
        "HAS_BIAS": layer.w13_bias is not None,
        "HAS_LIMIT": layer.limit is not None,
        "HAS_ROW_SCALE": layer.is_per_row,
        "UP_SCALE_COLUMNS": scale_columns(layer.w13_scale.shape[1], layer.w13.shape[1]),
        "DOWN_SCALE_COLUMNS": scale_columns(layer.w2_scale.shape[1], layer.w2.shape[1]),
        "HAS_ROUTER_WEIGHT": layer.is_weighted,
        "DTYPE": str(layer.out.dtype).removeprefix("torch."),
        "IS_STATIC": layer.given_scale is not None,
        "IS_WHOLE": layer.w2.shape[2] <= stream_rows.COLUMNS.value,
        "IS_OLD": layer.is_old,
    }


def _operands(layer: Layer) -> dict[str, Any]:
    """Return descriptors of rows and weights, depths in steps, and the tile."""
    block_m, stages, boxes, panels, group_m, warps = layer.tile
    hidden, width = layer.w2.shape[1:]
    rows = len(layer.rows)
    wanted = [(rows, hidden), (rows, width), (rows, hidden)]
    found = [tuple(x.shape) for x in (layer.rows, layer.codes, layer.out)]
    if found != wanted:
        raise ValueError(f"rows, codes, out: wanted the shapes {wanted}, got {found}")
    if len(layer.progress) <= len(layer.tile_list):
        sizes = (len(layer.tile_list), len(layer.progress))
        raise ValueError(f"progress: wanted more numbers than tile_list has rows, got {sizes}")
    head, rest = (stream_tiles.part_rows(block_m, part) for part in (0, 1))
    is_low = block_m <= tiles.STREAM_FEW_ROWS
    return {
        "a1": wgmma.described(layer.rows, [head, BOX_K]),
        "w1": wgmma.described(layer.w13.view(-1, hidden), [PANEL, BOX_K]),
        "a2": wgmma.described(layer.codes, [head, BOX_K]),
        "w2": wgmma.described(layer.w2.view(-1, width), [PANEL, BOX_K]),
        "b1": wgmma.described(layer.rows, [rest, BOX_K]) if rest else None,
        "b2": wgmma.described(layer.codes, [rest, BOX_K]) if rest else None,
        "up_steps": tiles.ceil_div(hidden, BOX_K * boxes // 2),
        "down_steps": tiles.ceil_div(width, BOX_K * boxes // panels),
        "intermediate": width,
        "hidden": hidden,
        "ROWS": block_m,
        "STAGES": stages,
        "BOXES": boxes,
        "DOWN_PANELS": panels,
        "GROUP_M": group_m,
        "POLICY": "evict_last" if block_m <= KEPT_ROWS else "",
        **(FEW_ROWS_REGISTERS if is_low else MORE_ROWS_REGISTERS),
        "num_warps": warps,
        "maxnreg": REGISTERS,
    }
