"""What surrounds the products, as Inductor's loop IR, so that it fuses with its neighbours.

T tokens, H hidden, K experts per token. Same formulas as tile_math.py: every operation here is
correctly rounded, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import ops

from ..compat_inductor import ieee_divide

Loader = Callable[[Sequence[Any]], Any]


def rounded_loader(x: ir.TensorBox) -> Loader:
    """Load values in fp32 at the precision of x's own dtype, also where its producer is fused in.

    Inductor elides the rounding to bf16 between fused operations.
    """
    load, dtype = x.make_loader(), x.get_dtype()

    def loader(index: Sequence[Any]) -> Any:
        value = load(index)
        if dtype != torch.float32:
            value = ops.to_dtype(value, dtype, use_compute_types=False)
            value = ops.to_dtype(value, torch.float32)
        return value

    return loader


def pointwise(
    like: ir.TensorBox, dtype: torch.dtype, ranges: Sequence[Any], inner: Loader
) -> ir.TensorBox:
    """Return a realised buffer of one value per index."""
    result = ir.Pointwise.create(
        device=like.get_device(), dtype=dtype, inner_fn=inner, ranges=list(ranges)
    )
    result.realize()
    return result


def weighted_loader(load: Loader, weights: ir.TensorBox, local: ir.TensorBox) -> Loader:
    """Multiply rows by their router weight in fp32; rows that no expert takes are 0."""
    weight, expert = weights.make_loader(), local.make_loader()

    def loader(index: Sequence[Any]) -> Any:
        row = index[0]
        scaled = ops.mul(load(index), ops.to_dtype(weight([row, 0]), torch.float32))
        is_live = ops.ge(expert([row]), ops.constant(0, torch.int32))
        return ops.where(is_live, scaled, ops.constant(0.0, torch.float32))

    return loader


def live_row_loader(load: Loader, tile_list: ir.TensorBox) -> Loader:
    """Take rows beyond the live contributions as 0: nothing wrote them."""
    counts = tile_list.make_loader()

    def loader(index: Sequence[Any]) -> Any:
        row = ops.index_expr(index[0], torch.int32)
        is_live = ops.lt(row, counts([0, 1]))
        return ops.where(is_live, load(index), ops.constant(0.0, torch.float32))

    return loader


def dynamic_scale(like: ir.TensorBox, load: Loader, *, is_per_row: bool) -> ir.TensorBox:
    """Return the fp32 scale of each row [rows], or of all rows together [1].

    amax / 127, and 1 where that quotient is 0; the maximum propagates NaN.
    """
    rows, columns = like.get_size()
    if is_per_row:
        ranges, reduced = [rows], [columns]

        def magnitude(index: Sequence[Any], inner: Sequence[Any]) -> Any:
            return ops.abs(load([index[0], inner[0]]))
    else:
        ranges, reduced = [1], [rows, columns]

        def magnitude(index: Sequence[Any], inner: Sequence[Any]) -> Any:
            return ops.abs(load(inner))

    amax = ir.Reduction.create(
        device=like.get_device_or_error(),
        dst_dtype=torch.float32,
        src_dtype=torch.float32,
        inner_fn=magnitude,
        ranges=ranges,
        reduction_ranges=reduced,
        reduction_type="max",
    )
    amax.realize()
    amax_loader = amax.make_loader()

    def scale(index: Sequence[Any]) -> Any:
        quotient = ieee_divide(amax_loader(index), ops.constant(127.0, torch.float32))
        is_zero = ops.eq(quotient, ops.constant(0.0, torch.float32))
        return ops.where(is_zero, ops.constant(1.0, torch.float32), quotient)

    return pointwise(like, torch.float32, ranges, scale)


def encode(
    like: ir.TensorBox, load: Loader, scale: ir.TensorBox, *, is_per_row: bool
) -> ir.TensorBox:
    """Return int8 codes round_half_even(x / scale) clamped to [-128, 127], NaN as 0."""
    scale_loader, dimensions = scale.make_loader(), len(scale.get_size())

    def code(index: Sequence[Any]) -> Any:
        at = [index[0]] if is_per_row else [0] * dimensions
        value = ieee_divide(load(index), scale_loader(at))
        value = ops.minimum(value, ops.constant(127.0, torch.float32))
        value = ops.maximum(value, ops.constant(-128.0, torch.float32))
        value = ops.round(value)
        value = ops.where(ops.isnan(value), ops.constant(0.0, torch.float32), value)
        return ops.to_dtype(value, torch.int8)

    return pointwise(like, torch.int8, like.get_size(), code)


def combine(
    parts: ir.TensorBox,
    local: ir.TensorBox,
    size: Sequence[Any],
    top_k: int,
    complete: Sequence[tuple[int, ir.TensorBox]] = (),
) -> ir.TensorBox:
    """Return [T,H]: the live contributions of a token summed in fp32 in slot order.

    An explicit loop: a sum reduction of eight terms or more is added as a tree. complete: with at
    most so many contributions a layer is there already, in a buffer of its own; rising.
    """
    loaders = [(most, whole.make_loader()) for most, whole in complete]
    load, expert, dtype = parts.make_loader(), local.make_loader(), parts.get_dtype()

    def total(index: Sequence[Any]) -> Any:
        token, column = index
        result = ops.constant(0.0, torch.float32)
        for slot in range(top_k):
            row = token * top_k + slot
            part = ops.to_dtype(load([row, column]), torch.float32)
            is_live = ops.ge(expert([row]), ops.constant(0, torch.int32))
            part = ops.where(is_live, part, ops.constant(0.0, torch.float32))
            result = ops.add(result, part)
        for most, whole in reversed(loaders):
            is_few = ops.le(
                ops.index_expr(size[0] * top_k, torch.int64), ops.constant(most, torch.int64)
            )
            result = ops.where(is_few, ops.to_dtype(whole(index), torch.float32), result)
        return ops.to_dtype(result, dtype, use_compute_types=False)

    return ir.Pointwise.create(
        device=parts.get_device(), dtype=dtype, inner_fn=total, ranges=list(size)
    )
