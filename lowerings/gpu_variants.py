"""Graphs by the kernels of variants.py: the host that adds nodes to Inductor's graph.

T tokens, K experts per token, E local experts. The kernels are launched as a user's own Triton
kernels are; what lies before and after stays loop IR that fuses with its neighbours.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
import triton
from torch._inductor import ir, lowering
from torch._inductor.lowering import empty_strided
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, Min

from .. import compat_inductor
from ..oracle import DeviceFacts
from . import tiles, variants
from .eager import scale_columns
from .eager_variants import FEW_MULTIPROCESSORS


@functools.cache
def configured(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """Return a kernel with its launch options: a graph takes them from a configuration."""
    config = triton.Config({}, num_warps=num_warps, num_stages=num_stages)
    return triton.autotune([config], key=[])(kernel)


class Described:
    """Stand for a tensor that a kernel reads by descriptor, in blocks."""

    def __init__(self, tensor: Any, block: tuple[int, ...]) -> None:
        self.tensor = tensor
        self.block = block


class GraphHost:
    """Make buffers and launch kernels as nodes of the graph that is being lowered."""

    def __init__(
        self,
        call: Any,
        dtype: torch.dtype,
        device: DeviceFacts,
        *,
        contributions: int,
        is_wanted: Any = 1,
        shared: dict[Any, Any] | None = None,
        is_first: bool = False,
    ) -> None:
        """Take a realized call of at most so many contributions, in a graph of one size likely so.

        is_wanted: 1, or an expression that is 0 where nothing is to be launched; shared: buffers of
        other hosts of the call, whose kernels are not launched where these are; is_first: the first
        launch comes in turn, so that what is outside of the graph is there for all others.
        """
        self.call = call
        self.dtype = dtype
        self.facts = device
        self.is_wanted = is_wanted
        self.shared = shared
        self.is_first = is_first
        self.made: Counter[Any] = Counter()
        self.device = call.hidden_states.get_device()
        self.is_early = starts_early(contributions, device)

    def size(self, x: Any) -> list[Any]:
        """Return a tensor's sizes: symbols for tokens, numbers for all that has a guard."""
        return [int(s) if s.is_number else s for s in map(_expression, x.get_size())]

    def strides(self, x: Any) -> list[Any]:
        """Return the strides of a buffer or of a view of one."""
        return [int(s) if s.is_number else s for s in map(_expression, x.get_stride())]

    def empty(self, *size: Any, dtype: torch.dtype) -> Any:
        """Return a new buffer, which kernels write."""
        if self.shared is None:
            return empty_strided(list(size), None, dtype=dtype, device=self.device)
        # A host asks for the same buffers in the same order as the others.
        kind = (tuple(size), dtype)
        self.made[kind] += 1
        at = (kind, self.made[kind])
        if at not in self.shared:
            self.shared[at] = empty_strided(list(size), None, dtype=dtype, device=self.device)
        return self.shared[at]

    def contiguous(self, x: Any) -> Any:
        """Return a tensor without gaps."""
        return contiguous(x)

    def panels(self, x: Any, panels: int) -> Any:
        """Return a weight as [E * panels, N / panels, depth]."""
        experts, rows, depth = self.size(x)
        return lowering.view(x, [experts * panels, rows // panels, depth])

    def scale(self, x: Any) -> Any:
        """Return a weight scale as contiguous [E, columns]."""
        return self.contiguous(lowering.view(x, x.get_size()[:2]))

    def descriptor(self, x: Any, block: list[int]) -> Described:
        """Return what stands for a tensor read in blocks.

        A buffer gets a view of its own: Inductor makes one descriptor of a buffer and block, and a
        later reader of that one would not depend on what was written in between (torch 2.11-2.13).
        """
        if isinstance(x.data, ir.StorageBox):
            x = ir.TensorBox(ir.ReinterpretView(data=x.data, layout=x.get_layout()))
        return Described(x, tuple(block))

    def launch(self, kernel: Any, programs: Any, arguments: dict[str, Any], tile: Any) -> None:
        """Add a launch to the graph."""
        arguments = {n: _boxed(a) if isinstance(a, ir.IRNode) else a for n, a in arguments.items()}
        blocks = {n: a.block for n, a in arguments.items() if isinstance(a, Described)}
        plain = {n: a.tensor if n in blocks else a for n, a in arguments.items()}
        grid = (programs * self.is_wanted, 1, 1)
        kernel = configured(kernel, tile.num_warps, tile.num_stages)
        timing = {"is_early": self.is_early, "is_first": self.is_first}
        compat_inductor.launch_in_graph(kernel, grid, plain, blocks, **timing)
        self.is_first = False

    def operate(self, operator: Any, *args: Any) -> None:
        """Add the call of an operator to the graph, with 0 programs where none is wanted."""
        *rest, programs, tile = args
        call = lowering.fallback_handler(operator, add_to_fallback_set=False)
        call(*rest, programs * self.is_wanted, tile)

    def is_old(self, *tensors: Any) -> bool:
        """Say whether tensors come into the graph, and so were there before its first launches.

        A launch that is not early, or the first product or spread, which let the next kernel start
        after their own wait, lies between. What the graph computes may come from the kernel ahead.
        """
        names = [tensor.get_name() for tensor in tensors if tensor is not None]
        outside = V.graph.graph_inputs.keys() | V.graph.constants.keys()
        return all(name in outside and name not in V.graph.mutated_buffers for name in names)

    def cdiv(self, a: Any, b: int) -> Any:
        """Return a / b, rounded up."""
        return tiles.ceil_div(a, b) if isinstance(a, int) else CeilDiv(a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        """Return the smaller size."""
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else Min(a, b)

    def multiprocessors(self) -> int:
        """Return how many multiprocessors the device has."""
        return self.facts.multiprocessors or FEW_MULTIPROCESSORS

    def code_arithmetic(self, x: Any) -> dict[str, bool]:
        """Say what the device has for codes beside x."""
        is_packed = tiles.packs_codes(self.facts, x.get_dtype().itemsize)
        return {
            "DOT4": not tiles.is_rocm(self.facts),
            "PACKED": is_packed,
            "TENSOR_CORES": is_packed and is_aligned(x),
        }

    def column_name(self, scale: Any, weight: Any) -> str:
        """Name how a scale belongs to its weight."""
        return scale_columns(self.size(scale)[1], self.size(weight)[1])


def contiguous(x: Any) -> ir.TensorBox:
    """Return a tensor without gaps as a buffer; what is none yet is copied, each time."""
    return _boxed(ir.ExternKernel.require_contiguous(x))


def realized(call: Any) -> Any:
    """Return a call whose tensors are buffers, as hosts take it: once for all hosts of a call."""
    scales = {
        name: None if scale is None else contiguous(lowering.view(scale, [-1]))
        for name, scale in (("a13_scale", call.a13_scale), ("a2_scale", call.a2_scale))
    }
    return call._replace(
        hidden_states=contiguous(call.hidden_states),
        topk_ids=contiguous(call.topk_ids),
        topk_weights=contiguous(call.topk_weights),
        w13=_boxed(ir.ExternKernel.realize_input(call.w13)),
        w2=_boxed(ir.ExternKernel.realize_input(call.w2)),
        **scales,
    )


def joins_loop(x: Any) -> bool:
    """Say whether a loop of the graph computes a tensor, which reading it can join.

    Buffers that kernels write are loops at first, too: of nothing.
    """
    while isinstance(x, (ir.MutableBox, ir.BaseView)):
        x = x.data
    if isinstance(x, ir.ComputedBuffer):
        return x.get_name() not in V.graph.mutated_buffers
    return isinstance(x, ir.Loops)


def lies_in_order(x: Any) -> bool:
    """Say whether a tensor is a buffer without gaps, or a view of one, as kernels read it."""
    layout = x.maybe_get_layout()
    return layout is not None and layout.is_contiguous()


def is_aligned(x: Any) -> bool:
    """Say whether a tensor begins where rows of descriptors and words may; a loop's result does."""
    layout = x.maybe_get_layout()
    if layout is None:
        return True
    if isinstance(layout, ir.NonOwningLayout):
        # A part of what torch.cat makes, which has the offset.
        layout = layout.view.get_layout()
    offset = layout.offset * x.get_dtype().itemsize
    is_multiple = V.graph.sizevars.statically_known_multiple_of(offset, variants.DESCRIPTOR_BYTES)
    return is_multiple and x.get_name() not in V.graph.unaligned_buffers


def starts_early(contributions: int, device: DeviceFacts) -> bool:
    """Say whether kernels of this graph start before those ahead have ended.

    Not where Inductor's own do: some of those end without having waited (torch 2.11-2.13).
    """
    is_plain = not V.graph.cpp_wrapper and not compat_inductor.inductor_launches_early()
    return is_plain and variants.starts_early(contributions, device)


def _boxed(x: Any) -> ir.TensorBox:
    """Return a realised tensor as launches take it: all but a TensorBox is a number there."""
    return x if isinstance(x, ir.TensorBox) else ir.TensorBox(x)


def _expression(size: Any) -> Any:
    """Return a size as an expression, a number where a guard says so."""
    return V.graph.sizevars.simplify(size)


def features_of(call: Any) -> variants.Features:
    """Return what of a call decides which variants take it; weights are static in shape."""

    def is_plain(x: Any) -> bool:
        sizevars, weight = V.graph.sizevars, ir.ExternKernel.realize_input(x)
        rows, depth = (int(sizevars.guard_int(s)) for s in x.get_size()[1:])
        per_expert, per_row = (int(sizevars.guard_int(s)) for s in weight.get_stride()[:2])
        return is_aligned(weight) and per_expert == rows * depth and per_row == depth

    # Wrappers in C++ have no tensor descriptors (torch 2.11).
    has_plain_weights = is_plain(call.w13) and is_plain(call.w2) and not V.graph.cpp_wrapper
    return variants.Features(
        call.activation_quant,
        call.hidden_states.get_dtype() == torch.int8,
        call.apply_router_weight_on_input,
        has_plain_weights,
    )
