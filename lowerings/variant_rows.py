"""The launches of variants that quantise rows: tokens into expert order, intermediates, tokens.

T tokens, H hidden, I intermediate, K experts per token; hosts as in variant_layers.py.
"""

from __future__ import annotations

from typing import Any

import torch

from . import quantizing, tiles, variants
from .tiles import Tile


def _row_tile(rows: int, columns: int, warps: int) -> Tile:
    return Tile(rows, columns, columns, warps, 1)


def spread(host: Any, plan: Any) -> Any:
    """Quantise tokens into expert order."""
    call = host.call
    tokens, columns = host.size(call.hidden_states)
    top_k = host.size(call.topk_ids)[1]
    is_token = call.activation_quant == "token"
    codes = host.empty(tokens * top_k, columns, dtype=torch.int8)
    scale = host.empty(tokens * top_k, dtype=torch.float32) if is_token else call.a13_scale
    stride_xr, stride_xc = host.strides(call.hidden_states)
    block = variants.whole_row(columns)
    height = max(1, tiles.ROW_ELEMENTS // block)
    arguments = {
        "codes_ptr": codes,
        "scale_out_ptr": scale,
        "x_ptr": call.hidden_states,
        "given_ptr": scale,
        "local_ptr": plan.local,
        "inverse_ptr": plan.inverse,
        "num_rows": tokens,
        "columns": columns,
        "stride_xr": stride_xr,
        "stride_xc": stride_xc,
        "QUANT": call.activation_quant,
        "TOP_K": top_k,
        "ROWS": height,
        "BLOCK": block,
    }
    tile = _row_tile(height, block, max(1, min(8, height * block // 512)))
    host.launch(quantizing.spread_kernel, host.cdiv(tokens, height), arguments, tile)
    return codes, scale, is_token


def requantize(host: Any, middle: Any, codes: Any, scale: Any, live: Any | None) -> None:
    """Quantise the intermediate in a launch of its own."""
    rows, columns = host.size(middle)
    block = variants.whole_row(columns)
    height = max(1, tiles.ROW_ELEMENTS // block) if live is not None else 1
    arguments = {
        "codes_ptr": codes,
        "scale_out_ptr": scale,
        "x_ptr": middle,
        "given_ptr": scale,
        "live_ptr": live,
        "num_rows": rows,
        "columns": columns,
        "QUANT": host.call.activation_quant,
        "HAS_LIVE": live is not None,
        "ROWS": height,
        "BLOCK": block,
    }
    tile = _row_tile(height, block, max(1, min(8, height * block // 512)))
    host.launch(quantizing.requantize_kernel, host.cdiv(rows, height), arguments, tile)


def codes(host: Any, x: Any, given: Any | None) -> tuple[Any, Any, bool]:
    """Quantise rows in a launch of their own, by a given scale or one for each row."""
    codes = host.empty(*host.size(x), dtype=torch.int8)
    scale = host.empty(host.size(x)[0], dtype=torch.float32) if given is None else given
    requantize(host, x, codes, scale, None)
    return codes, scale, given is None
