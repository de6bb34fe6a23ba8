"""Refuse wrong arguments: one set of checks, run by the fakes (at trace time) and the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compat import size_hint, sizes_equal
from .arguments import LARGEST_FP32, ExpertsArguments
from .schema import ACTIVATION_QUANTS, ACTIVATIONS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROW_DTYPES = (*FLOATS, torch.int8)
INTEGERS = (torch.int32, torch.int64)
OPTIONAL_TENSORS = ("a13_scale", "a2_scale", "w13_bias", "w2_bias", "expert_map")


def refuse(name: str, wanted: str, got: object) -> NoReturn:
    """Raise the ValueError that every check raises."""
    raise ValueError(f"{name}: wanted {wanted}, got {got}")


def _shown(sizes: Sequence[Any]) -> list[Any]:
    """Return sizes for a message: a traced one as the number of this call where it is known."""
    return [size if isinstance(size, int) else size_hint(size) for size in sizes]


def _shape(tensor: Tensor) -> list[Any]:
    return _shown(tensor.shape)


def _fits(tensor: Tensor, *sizes: Any) -> bool:
    """Tell whether a shape is the one given; None stands for any size.

    A plain loop, plain ints first: it runs some ten times a call.
    """
    shape = tensor.shape
    if len(shape) != len(sizes):
        return False
    for have, size in zip(shape, sizes, strict=True):
        if size is None or have is size:
            continue
        if type(have) is int and type(size) is int:
            if have != size:
                return False
        elif not sizes_equal(have, size):
            return False
    return True


def _want_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        refuse(name, " or ".join(str(dtype) for dtype in allowed), tensor.dtype)


def _want_shape(name: str, tensor: Tensor, letters: str, *sizes: Any) -> None:
    if not _fits(tensor, *sizes):
        known = ", ".join("any" if size is None else str(_shown([size])[0]) for size in sizes)
        refuse(name, f"shape {letters} = [{known}]", _shape(tensor))


def _want_weight(name: str, codes: Tensor) -> None:
    _want_dtype(name, codes, (torch.int8,))
    stride = codes.stride(-1)
    if type(stride) is int and stride == 1:
        return
    if not sizes_equal(codes.shape[-1], 1) and not sizes_equal(stride, 1):
        refuse(name, "a contiguous last dimension (stride 1)", f"stride {list(codes.stride())}")


def _want_weight_scale(
    name: str, scale: Tensor, leading: Sequence[Any], rows: Any, *, halves: bool
) -> None:
    """Check a weight scale: [..., rows], [..., 1], with halves [..., 2]; or with one 1 more."""
    _want_dtype(name, scale, (torch.float32,))
    few = (1, 2) if halves else (1,)
    at = len(leading)
    # by the number of this call: an unbacked one has none, it can only be that of the rows
    have = size_hint(scale.shape[at]) if scale.dim() > at else None
    per_tensor = type(have) is int and have in few and have != size_hint(rows)
    columns = have if per_tensor else rows
    if _fits(scale, *leading, columns) or _fits(scale, *leading, columns, 1):
        return
    shapes = " or ".join(str(_shown([*leading, c])) for c in (rows, *few))
    refuse(name, f"shape {shapes} (a trailing 1 is accepted)", _shape(scale))


def _want_one_value(name: str, scale: Tensor | None, why: str) -> None:
    if scale is None:
        refuse(name, f"one fp32 value ([] or [1]) with {why}", None)
    _want_dtype(name, scale, (torch.float32,))
    if not (_fits(scale) or _fits(scale, 1)):
        refuse(name, f"one value, shape [] or [1], with {why}", _shape(scale))


def check_layouts(call: ExpertsArguments) -> None:
    """Refuse sparse and other tensors without strides.

    The fakes see them; the dispatcher sends a call with such a one to a kernel of its own, so
    that other calls need not look.
    """
    for name, value in call._asdict().items():
        if isinstance(value, Tensor):
            _want_strided(name, value)


def _want_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        refuse(name, "a dense tensor (layout torch.strided)", tensor.layout)


def check_experts(call: ExpertsArguments, *, traced: bool) -> None:
    """Check one call of int8moe::experts. Raises ValueError naming argument, wanted, got.

    Compares sizes with each other only: nothing here depends on how large T is. traced: sizes
    may be symbolic (fakes); kernels say False and take a shorter way to the same answer.
    """
    if traced:
        check_layouts(call)
    _check_words(call)
    if traced or not _is_common(call):
        _check_weights(call)
        _check_rows(call)
    _check_activation_scales(call)
    _check_optional_tensors(call)
    _check_devices(call)


def _is_common(call: ExpertsArguments) -> bool:
    """Tell at once that _check_weights and _check_rows would pass a call of the usual layout.

    False only means unsure. Whole shapes compare in C, so sizes must be plain ints: together
    with the other checks 5.4 us a call, where the named ones alone take 15 (same machine).
    """
    x, w13, w13_scale, w2, w2_scale, weights, ids = call[:7]
    shape, routed = w13.shape, ids.shape
    if len(shape) != 3 or len(routed) != 2 or call.apply_router_weight_on_input:
        return False
    experts, rows, hidden = shape
    return (
        w2.shape == (experts, hidden, rows // 2 if call.gated else rows)
        and w13_scale.shape == (experts, rows)
        and w2_scale.shape == (experts, hidden)
        and weights.shape == routed
        and x.shape == (routed[0], hidden)
        and hidden > 0
        and rows > 0
        and not (call.gated and rows % 2)
        and w13.dtype is w2.dtype is torch.int8
        and w13_scale.dtype is w2_scale.dtype is torch.float32
        and x.dtype in ROW_DTYPES
        and weights.dtype in FLOATS
        and ids.dtype in INTEGERS
        and w13.is_contiguous()
        and w2.is_contiguous()
    )


def _fits_fp32(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= LARGEST_FP32


def _check_words(call: ExpertsArguments) -> None:
    if call.activation_quant not in ACTIVATION_QUANTS:
        refuse("activation_quant", f"one of {list(ACTIVATION_QUANTS)}", repr(call.activation_quant))
    if call.activation not in ACTIVATIONS:
        refuse("activation", f"one of {list(ACTIVATIONS)}", repr(call.activation))
    if call.alpha != 1.0 and call.activation != "silu":
        refuse("alpha", '1.0 unless activation="silu"', call.alpha)
    if not _fits_fp32(call.alpha):
        refuse("alpha", "a number finite in fp32", call.alpha)
    if not call.gated and call.beta != 0.0:
        refuse("beta", "0.0 with gated=False", call.beta)
    if not _fits_fp32(call.beta):
        refuse("beta", "a number finite in fp32", call.beta)
    if call.limit is not None:
        if not call.gated:
            refuse("limit", "None with gated=False", call.limit)
        if not call.limit >= 0.0:
            refuse("limit", "None or a number >= 0", call.limit)
    if call.out_dtype is not None and call.out_dtype not in FLOATS:
        refuse("out_dtype", " or ".join(str(dtype) for dtype in FLOATS), call.out_dtype)


def _check_weights(call: ExpertsArguments) -> None:
    w13, w2 = call.w13, call.w2
    if w13.dim() != 3:
        refuse("w13", "shape [E,N,H]", _shape(w13))
    if w2.dim() != 3:
        refuse("w2", "shape [E,H,I]", _shape(w2))
    experts, rows, hidden = w13.shape
    if call.gated and not sizes_equal(rows % 2, 0):
        refuse("w13", "an even N = 2*I (gate rows, then up rows) with gated=True", _shape(w13))
    for name, size in (("N", rows), ("H", hidden)):
        if isinstance(size, int) and size == 0:
            refuse("w13", f"{name} > 0", _shape(w13))
    _want_shape("w2", w2, "[E,H,I]", experts, hidden, call.intermediate_size)
    _want_weight("w13", w13)
    _want_weight("w2", w2)
    _want_weight_scale("w13_scale", call.w13_scale, [experts], rows, halves=call.gated)
    _want_weight_scale("w2_scale", call.w2_scale, [experts], hidden, halves=False)


def _check_rows(call: ExpertsArguments) -> None:
    hidden_states, weights, ids = call.hidden_states, call.topk_weights, call.topk_ids
    _want_dtype("hidden_states", hidden_states, ROW_DTYPES)
    _want_shape("hidden_states", hidden_states, "[T,H]", None, call.w13.shape[2])
    tokens = hidden_states.shape[0]
    _want_dtype("topk_weights", weights, FLOATS)
    _want_shape("topk_weights", weights, "[T,K]", tokens, None)
    _want_dtype("topk_ids", ids, INTEGERS)
    _want_shape("topk_ids", ids, "[T,K]", tokens, weights.shape[1])
    if call.apply_router_weight_on_input and not sizes_equal(weights.shape[1], 1):
        refuse("topk_ids", "K = 1 with apply_router_weight_on_input=True", _shape(ids))


def _check_activation_scales(call: ExpertsArguments) -> None:
    word, a13, a2 = call.activation_quant, call.a13_scale, call.a2_scale
    codes_given = call.hidden_states.dtype == torch.int8
    if codes_given and word == "none":
        refuse("hidden_states", 'float values with activation_quant="none"', torch.int8)
    if codes_given and call.apply_router_weight_on_input:
        refuse("hidden_states", "float values with apply_router_weight_on_input", torch.int8)
    if word == "static":
        _want_one_value("a13_scale", a13, 'activation_quant="static"')
        _want_one_value("a2_scale", a2, 'activation_quant="static"')
        return
    if a2 is not None:
        refuse("a2_scale", f'None with activation_quant="{word}"', f"shape {_shape(a2)}")
    if not codes_given:
        if a13 is not None:
            refuse(
                "a13_scale",
                f'None with float hidden_states and activation_quant="{word}"',
                f"shape {_shape(a13)}",
            )
    elif word == "tensor":
        _want_one_value("a13_scale", a13, "int8 hidden_states")
    else:
        if a13 is None:
            refuse("a13_scale", "fp32 [T] or [T,1] with int8 hidden_states", None)
        _want_dtype("a13_scale", a13, (torch.float32,))
        tokens = call.hidden_states.shape[0]
        if not (_fits(a13, tokens) or _fits(a13, tokens, 1)):
            known = _shown([tokens])[0]
            refuse("a13_scale", f"shape [T] or [T,1] with T = {known}", _shape(a13))


def _check_optional_tensors(call: ExpertsArguments) -> None:
    experts, rows, hidden = call.w13.shape
    if call.w13_bias is not None:
        _want_dtype("w13_bias", call.w13_bias, FLOATS)
        _want_shape("w13_bias", call.w13_bias, "[E,N]", experts, rows)
    if call.w2_bias is not None:
        _want_dtype("w2_bias", call.w2_bias, FLOATS)
        _want_shape("w2_bias", call.w2_bias, "[E,H]", experts, hidden)
    if call.expert_map is not None:
        _want_dtype("expert_map", call.expert_map, INTEGERS)
        _want_shape("expert_map", call.expert_map, "[G]", None)


def _check_devices(call: ExpertsArguments) -> None:
    device = call.hidden_states.device
    if call.w13.device != device and len({weight.device for weight in call[1:5]}) == 1:
        refuse("hidden_states", f"device {call.w13.device}, that of the weights", device)
    for name, value in zip(call._fields[1:7], call[1:7], strict=True):
        if value.device != device:
            refuse(name, f"device {device}, that of hidden_states", value.device)
    for name in OPTIONAL_TENSORS:
        value = getattr(call, name)
        if value is not None and value.device != device:
            refuse(name, f"device {device}, that of hidden_states", value.device)


def check_dequantize(
    codes: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    activation_quant: str,
    a_scale: Tensor | None,
) -> None:
    """Check one call of int8moe::dequantize. Raises ValueError naming argument, wanted, got."""
    for name, tensor in (("codes", codes), ("scale", scale), ("a_scale", a_scale)):
        if tensor is not None:
            _want_strided(name, tensor)
    _want_dtype("codes", codes, (torch.int8,))
    if codes.dim() < 2:
        refuse("codes", "at least two dimensions [..., rows, columns]", _shape(codes))
    rows = codes.shape[-2]
    halves = not isinstance(rows, int) or rows % 2 == 0
    _want_weight_scale("scale", scale, codes.shape[:-2], rows, halves=halves)
    if dtype not in FLOATS:
        refuse("dtype", " or ".join(str(allowed) for allowed in FLOATS), dtype)
    if activation_quant not in ACTIVATION_QUANTS:
        refuse("activation_quant", f"one of {list(ACTIVATION_QUANTS)}", repr(activation_quant))
    if activation_quant == "static":
        _want_one_value("a_scale", a_scale, 'activation_quant="static"')
    elif a_scale is not None:
        refuse("a_scale", f'None with activation_quant="{activation_quant}"', _shape(a_scale))
    for name, tensor in (("scale", scale), ("a_scale", a_scale)):
        if tensor is not None and tensor.device != codes.device:
            refuse(name, f"device {codes.device}, that of codes", tensor.device)
