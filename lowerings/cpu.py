"""Compute int8moe::experts on CPU with the C++ kernel of lowerings/cpp, else with the plain one.

The kernel reads the tensors where they lie: any strides of weights, scales and routing, float
inputs of any dtype; only a row whose values are not adjacent is copied first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

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


class Layouts(NamedTuple):
    """Fields of `struct Call` between its addresses: what no run of a compiled graph changes."""

    out: tuple[int]
    hidden: tuple[int, int]
    w13: tuple[int, ...]
    w13_scale: tuple[int, ...]
    w13_bias: tuple[int, ...]
    w2: tuple[int, ...]
    w2_scale: tuple[int, ...]
    w2_bias: tuple[int, ...]
    router: tuple[int, ...]
    ids: tuple[int, ...]
    expert_map: tuple[int, ...]
    a13_scale: tuple[int]
    sizes: tuple[int, int]
    words: tuple[int, ...]
    numbers: tuple[float, float, float]

    @classmethod
    def of(cls, call: ExpertsArguments) -> Layouts:
        """Read the layouts of a call's tensors, which may be on the meta device."""
        x, router, ids, mapped = (
            call.hidden_states,
            call.topk_weights,
            call.topk_ids,
            call.expert_map,
        )
        a13 = call.a13_scale
        return cls(
            (DTYPES[call.result_dtype],),
            (DTYPES[x.dtype], x.stride(0)),
            _codes(call.w13),
            _scale(call.w13_scale),
            _bias(call.w13_bias),
            _codes(call.w2),
            _scale(call.w2_scale),
            _bias(call.w2_bias),
            (DTYPES[router.dtype], *router.stride()),
            (ids.dtype == torch.int64, *ids.stride()),
            (0, 0, 0, 0) if mapped is None else _map(mapped),
            # int8 rows have a scale each, static ones one for all
            (0 if a13 is None or a13.numel() == 1 else a13.stride(0),),
            (call.w13.shape[0], ids.shape[1]),
            (
                *(QUANTS[call.activation_quant], FUNCTIONS[call.activation], call.gated),
                *(call.apply_router_weight_on_input, call.limit is not None),
            ),
            (call.alpha, call.beta, 0.0 if call.limit is None else call.limit),
        )


def experts(call: ExpertsArguments) -> Tensor:
    """Compute one call whose arguments are already checked. Returns [T,H] of the result dtype."""
    if cpu_build.kernel() is None:
        return plain.experts(call)
    call = _with_adjacent_rows(call)
    # contiguous and on the CPU whatever the input's strides and the default device are
    out = torch.empty(call.hidden_states.shape, dtype=call.result_dtype, device="cpu")
    run(Layouts.of(call), call, out)
    return out


def run(layouts: Layouts, call: ExpertsArguments, out: Tensor) -> None:
    """Let the compiled kernel write out [T,H]. Raises MemoryError when its scratch does not fit."""
    if out.numel() == 0:
        return
    tokens = call.hidden_states.shape[0]
    packed = LAYOUT.pack(
        *(out.data_ptr(), *layouts.out, call.hidden_states.data_ptr(), *layouts.hidden),
        *(call.w13.data_ptr(), *layouts.w13, call.w13_scale.data_ptr(), *layouts.w13_scale),
        *(_address(call.w13_bias), *layouts.w13_bias),
        *(call.w2.data_ptr(), *layouts.w2, call.w2_scale.data_ptr(), *layouts.w2_scale),
        *(_address(call.w2_bias), *layouts.w2_bias),
        *(call.topk_weights.data_ptr(), *layouts.router),
        *(call.topk_ids.data_ptr(), *layouts.ids),
        # an empty map may have no address, yet says that every id is unknown
        *(0 if call.expert_map is None else call.expert_map.data_ptr() or 1, *layouts.expert_map),
        *(_address(call.a13_scale), *layouts.a13_scale, _address(call.a2_scale)),
        *(tokens, *layouts.sizes, *layouts.words, *layouts.numbers),
        *(torch.get_num_threads(), SCRATCH_BYTES),
    )
    kernel = cpu_build.kernel()
    assert kernel is not None
    if kernel(packed) != 0:
        raise MemoryError(f"int8moe::experts: no memory for {tokens} tokens on CPU")


class GraphCall:
    """A call in a compiled graph, whose layouts were read and arguments checked at compile time.

    Saves the operator's dispatch, checks and packing: 49 -> 13 us a call, 220 -> 128 where caches
    are cold, as they are after a layer whose weights come from memory (docs/cpu.md).
    """

    def __init__(
        self, names: tuple[str, ...], layouts: Iterable[Any], options: dict[str, Any]
    ) -> None:
        """Take the names of the tensors to come, their layouts, and all that is no tensor."""
        self.names = names
        self.layouts = Layouts(*layouts)
        self.options = options

    def __call__(self, *tensors: Tensor, out: Tensor) -> None:
        """Write out [T,H], given the tensors in the order of their names."""
        fields = {**self.options, **dict(zip(self.names, tensors, strict=True))}
        call = ExpertsArguments(**fields)
        if cpu_build.kernel() is None:
            out.copy_(plain.experts(call))
        else:
            run(self.layouts, call, out)


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


def _codes(codes: Tensor) -> tuple[int, int, int, int]:
    _, rows, columns = codes.shape
    return codes.stride(0), codes.stride(1), rows, columns


def _scale(scale: Tensor) -> tuple[int, int, int]:
    return scale.stride(0), scale.stride(1), scale.shape[1]


def _bias(bias: Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (DTYPES[bias.dtype], bias.stride(0))


def _map(expert_map: Tensor) -> tuple[int, ...]:
    return expert_map.dtype == torch.int64, expert_map.stride(0), 0, expert_map.shape[0]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
