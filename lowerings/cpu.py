"""Compute int8moe::experts on CPU with the C++ kernel of lowerings/cpp, else with the plain one.

The kernel reads the tensors where they lie: any strides of weights, scales and routing, float
inputs of any dtype; only a row whose values are not adjacent is copied first.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor

from ..ops import cpu as plain
from ..ops.arguments import ExpertsArguments
from ..ops.schema import ACTIVATION_QUANTS, ACTIVATIONS
from . import cpu_build

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
QUANTS: Final = {word: index for index, word in enumerate(ACTIVATION_QUANTS)}
FUNCTIONS: Final = {word: index for index, word in enumerate(ACTIVATIONS)}

# Eight-byte fields of `struct Call` in cpp/call.h, group by group in its order. Packing 58 of them
# takes 0.7 us, making a ctypes.Structure of as many 9 us (CPython 3.11).
FIELDS: Final = (
    ("out", "qq"),
    ("hidden", "qqq"),
    ("w13", "qqqqqqqqqqqq"),
    ("w2", "qqqqqqqqqqqq"),
    ("router", "qqqq"),
    ("ids", "qqqq"),
    ("expert_map", "qqqqq"),
    ("a13_scale", "qq"),
    ("a2_scale", "q"),
    ("sizes", "qqq"),
    ("words", "qqqqq"),
    ("numbers", "ddd"),
    ("resources", "qq"),
)

# Codes, intermediates and contributions of one call; more tokens than fit run in chunks ("tensor"
# cannot: its scale is everybody's). At 256 MB a chunk's products outweigh reading weights again.
SCRATCH_BYTES = 256 << 20

LAYOUT: Final = struct.Struct("=" + "".join(kinds for _, kinds in FIELDS))


def experts(call: ExpertsArguments) -> Tensor:
    """Compute one call whose arguments are already checked. Returns [T,H] of the result dtype."""
    kernel = cpu_build.kernel()
    if kernel is None:
        return plain.experts(call)
    call = _with_adjacent_rows(call)
    # contiguous and on the CPU whatever the input's strides and the default device are
    out = torch.empty(call.hidden_states.shape, dtype=call.result_dtype, device="cpu")
    if out.numel() == 0:
        return out
    if kernel(_pack(call, out)) != 0:
        raise MemoryError(f"int8moe::experts: no memory for {out.shape[0]} tokens on CPU")
    return out


def _adjacent(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def _with_adjacent_rows(call: ExpertsArguments) -> ExpertsArguments:
    """Copy the few tensors whose rows the kernel could not read."""
    hidden_states = _adjacent(call.hidden_states)
    w13_bias, w2_bias = _adjacent(call.w13_bias), _adjacent(call.w2_bias)
    same = hidden_states is call.hidden_states and w13_bias is call.w13_bias
    if same and w2_bias is call.w2_bias:
        return call
    assert hidden_states is not None
    return call._replace(hidden_states=hidden_states, w13_bias=w13_bias, w2_bias=w2_bias)


def _weight(codes: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    _, rows, columns = codes.shape
    expert_stride, row_stride, _ = codes.stride()
    return (
        codes.data_ptr(),
        expert_stride,
        row_stride,
        rows,
        columns,
        scale.data_ptr(),
        scale.stride(0),
        scale.stride(1),
        scale.shape[1],
        *((0, 0, 0) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype], bias.stride(0))),
    )


def _row_scale(scale: Tensor | None) -> tuple[int, int]:
    """Return where the scales of int8 or static rows are, and how far apart (0: one for all)."""
    if scale is None:
        return 0, 0
    return scale.data_ptr(), scale.stride(0) if scale.numel() > 1 else 0


def _pack(call: ExpertsArguments, out: Tensor) -> bytes:
    x, weights, ids, mapped = (
        call.hidden_states,
        call.topk_weights,
        call.topk_ids,
        call.expert_map,
    )
    no_map = (0, 0, 0, 0, 0)
    return LAYOUT.pack(
        *(out.data_ptr(), DTYPES[out.dtype]),
        *(x.data_ptr(), DTYPES[x.dtype], x.stride(0)),
        *_weight(call.w13, call.w13_scale, call.w13_bias),
        *_weight(call.w2, call.w2_scale, call.w2_bias),
        *(weights.data_ptr(), DTYPES[weights.dtype], *weights.stride()),
        *(ids.data_ptr(), ids.dtype == torch.int64, *ids.stride()),
        *(no_map if mapped is None else _map(mapped)),
        *_row_scale(call.a13_scale),
        _row_scale(call.a2_scale)[0],
        *(x.shape[0], call.w13.shape[0], ids.shape[1]),
        *(QUANTS[call.activation_quant], FUNCTIONS[call.activation], call.gated),
        *(call.apply_router_weight_on_input, call.limit is not None),
        *(call.alpha, call.beta, 0.0 if call.limit is None else call.limit),
        *(torch.get_num_threads(), SCRATCH_BYTES),
    )


def _map(expert_map: Tensor) -> tuple[int, ...]:
    # an empty tensor may have no address, yet says that every id is unknown
    address = expert_map.data_ptr() or 1
    is_int64 = expert_map.dtype == torch.int64
    return address, is_int64, expert_map.stride(0), 0, expert_map.shape[0]
