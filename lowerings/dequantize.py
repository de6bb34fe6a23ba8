"""The lowering of int8moe::dequantize where a graph kept it: codes times scale, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import ops

from .. import registry


def register() -> None:
    """Put the lowering into Inductor's table."""
    overload = torch.ops.int8moe.dequantize.default
    lowering.register_lowering(overload, type_promotion_kind=None)(lower)


def lower(
    codes: ir.TensorBox,
    scale: ir.TensorBox,
    *,
    dtype: torch.dtype,
    activation_quant: str = "token",
    a_scale: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """Lower codes [..., N, H] and scale [..., N], [..., 1] or [..., 2], a trailing 1 allowed."""
    registry.marker_lowered()
    load_code, load_scale = codes.make_loader(), scale.make_loader()
    leading = len(codes.get_size()) - 2
    rows, columns = codes.get_size()[leading], scale.get_size()[leading]
    trailing = [0] * (len(scale.get_size()) - leading - 1)

    def column(row: Any) -> Any:
        if columns == rows:
            return row
        return 0 if columns == 1 else row // (rows // 2)

    def value(index: Sequence[Any]) -> Any:
        *outer, row, _ = index
        code = ops.to_dtype(load_code(index), torch.float32)
        product = ops.mul(code, load_scale([*outer, column(row), *trailing]))
        # Also where what follows is fused in, and would otherwise go on with fp32.
        return ops.to_dtype(product, dtype, use_compute_types=False)

    return ir.Pointwise.create(
        device=codes.get_device(), dtype=dtype, inner_fn=value, ranges=codes.get_size()
    )
