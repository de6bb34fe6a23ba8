"""The launches of variants that quantise rows: tokens into expert order, intermediates, tokens.

T tokens, H hidden, I intermediate, K experts per token; hosts as in variant_layers.py.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from . import quantizing, tiles, variants
from .tiles import Tile

# Of many rows a program takes so many elements, 32 a thread or more, as each thread computes its
# rows' reciprocals: 131,072 rows of 768 took 97 us instead of 109 at 16 a thread, 8192 of 14336
# 105 instead of 161 (an H200).
MANY_ROWS_ELEMENTS: Final = 2048


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
    block = tiles.whole_row(columns)
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
    block = tiles.whole_row(columns)
    height, warps = 1, max(1, min(8, block // 512))
    if live is not None:
        height = max(1, MANY_ROWS_ELEMENTS // block)
        warps = max(1, min(4, height * block // 1024))
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
    tile = _row_tile(height, block, warps)
    host.launch(quantizing.requantize_kernel, host.cdiv(rows, height), arguments, tile)


def takes(call: Any, dtype: torch.dtype, depth: int) -> bool:
    """Say whether codes quantises a call's tokens, which are of a dtype and so many columns."""
    is_plain = dtype != torch.int8 and not call.apply_router_weight_on_input
    is_quantised = call.activation_quant in ("token", "static")
    return is_plain and is_quantised and depth <= variants.WHOLE_ROW


def codes(host: Any, x: Any, given: Any | None) -> tuple[Any, Any, bool]:
    """Quantise rows in a launch of their own, by a given scale or one for each row."""
    codes = host.empty(*host.size(x), dtype=torch.int8)
    scale = host.empty(host.size(x)[0], dtype=torch.float32) if given is None else given
    requantize(host, x, codes, scale, None)
    return codes, scale, given is None
