"""One call of int8moe::experts in a CPU graph: the C++ kernel, called without the dispatcher.

Arguments passed the fake's checks. ``call`` is an ExpertsArguments whose tensors are Inductor's
buffers, hence untyped here. T may be symbolic; everything else about the layouts has to be known,
or the graph calls the operator itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.virtualized import V

from ..ops.arguments import ExpertsArguments
from .cpu import Layouts

PER_TOKEN = ("hidden_states", "topk_weights", "topk_ids", "a13_scale")
IMPORT = "from int8moe_compile.lowerings.cpu import GraphCall as Int8MoeGraphCall"


class ExpertsKernel(ir.ExternKernelOut):
    """Call a GraphCall, whose definition goes to the head of the generated module."""

    def __init__(self, layout: ir.Layout, inputs: Sequence[Any], definition: str) -> None:
        name = f"int8moe_experts_{hashlib.sha256(definition.encode()).hexdigest()[:12]}"
        self.lines = (IMPORT, f"{name} = {definition}")
        super().__init__(layout, inputs, python_kernel_name=name)

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        """Write the definition once a module, and the call."""
        root = wrapper
        while isinstance(root, SubgraphPythonWrapperCodegen):  # whose own head is not written
            root = root.parent_wrapper
        for line in self.lines:
            root.add_import_once(line)
        super().codegen(wrapper)


def lower(call: ExpertsArguments) -> ir.TensorBox | None:
    """Return the buffer that the kernel writes; None where the graph has to call the operator.

    A graph without Python (cpp_wrapper, AOTInductor) has no one to pack the call.
    """
    if V.graph.cpp_wrapper:
        return None
    fields = call._asdict()
    buffers = {name: _realized(name, x) for name, x in fields.items() if isinstance(x, ir.IRNode)}
    known: dict[str, Any] = {name: _stand_in(name, buffer) for name, buffer in buffers.items()}
    options = {name: value for name, value in fields.items() if name not in buffers}
    if any(tensor is None for tensor in known.values()) or not _is_plain(options):
        return None
    meta = call._replace(**known)
    for bias in (meta.w13_bias, meta.w2_bias):
        if bias is not None and bias.stride(1) != 1:
            return None
    given = {name: value for name, value in options.items() if value is not None}
    definition = f"Int8MoeGraphCall({tuple(buffers)!r}, {tuple(Layouts.of(meta))!r}, {given!r})"
    hidden = buffers["hidden_states"]
    sizes = hidden.get_size()
    layout = ir.FixedLayout(hidden.get_device(), meta.result_dtype, sizes)
    return ir.TensorBox.create(ExpertsKernel(layout, list(buffers.values()), definition))


def _realized(name: str, x: Any) -> Any:
    if name in PER_TOKEN:
        x = ir.ExternKernel.require_contiguous(x)  # may leave a single value unrealized
    buffer = ir.ExternKernel.realize_input(x)
    buffer.freeze_layout()
    return buffer


def _stand_in(name: str, buffer: Any) -> torch.Tensor | None:
    """Return a tensor without memory that has a buffer's layout; None if that is not known.

    K gets a guard where it is symbolic, as on CUDA.
    """
    sizes, strides = list(buffer.get_size()), list(buffer.get_stride())
    if name in PER_TOKEN and sizes:  # contiguous: no stride depends on T
        tokens = int(sizes[0]) if _is_int(sizes[0]) else 2
        fixed = [int(V.graph.sizevars.guard_int(size)) for size in sizes[1:]]
        return torch.empty(tokens, *fixed, dtype=buffer.get_dtype(), device="meta")
    if not all(_is_int(number) for number in (*sizes, *strides)):
        return None
    return torch.empty_strided(
        [int(size) for size in sizes],
        [int(stride) for stride in strides],
        dtype=buffer.get_dtype(),
        device="meta",
    )


def _is_int(number: Any) -> bool:
    return isinstance(number, int) or getattr(number, "is_Integer", False)


def _is_plain(options: dict[str, Any]) -> bool:
    """Tell whether everything reads back from the source that it is written to."""
    numbers = (options["alpha"], options["beta"], options["limit"] or 0.0)
    return all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers)
