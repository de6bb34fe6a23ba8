"""What of compat.py concerns the code that Inductor generates: kernels, templates, divisions."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import torch


@functools.cache
def order_reloads() -> None:
    """Have generated reductions wait before they read a buffer again that they have written.

    Inductor keeps a value from one loop of a kernel to the next in memory; torch 2.11 to 2.13 put
    no barrier between, and threads read there what others wrote: the rows of a norm behind the sum
    over experts came out wrong on an H200. Removable when 2.13 is no longer supported, as 2.14 has
    that barrier (pytorch/pytorch#190517).
    """
    if torch.__version__ >= "2.14":
        return
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.triton import TritonKernel

    load = TritonKernel.load

    @functools.wraps(load)
    def load_after_writes(self: Any, name: str, index: Any) -> Any:
        ordered = self.__dict__.setdefault("_int8moe_ordered", set())
        if name in self.cse.invalidated_stores and name not in ordered:
            ordered.add(name)
            # What is in the body by now is the loop that wrote.
            self.body.writeline(DeferredLine(name, "tl.debug_barrier()"))
        return load(self, name, index)

    TritonKernel.load = load_after_writes  # type: ignore[method-assign]


@functools.cache
def gluon_compiles() -> bool:
    """Say whether the installed Triton compiles wgmma_kernels.py and stream_kernels.py, in Gluon.

    That language is experimental and changes with every release: 3.6 ran on an H200, by 3.7 the
    kernels were compiled, and those of stream_kernels.py ran. Triton's interpreter does not run it.
    A Triton distributed under another name (nightlies of PyTorch) is not known. Removable when
    Gluon is stable.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    try:
        release = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    return release.startswith(("3.6.", "3.7."))


def select_algorithm(
    name: str, choices: list[Any], inputs: list[Any], layout: Any, input_gen_fns: dict[int, Any]
) -> Any:
    """Return the output of the best of several Inductor choices; with one, nothing is timed.

    Removable with torch 2.11: from 2.13 on autotune_select_algorithm returns (node, choice), in
    2.11 the node alone.
    """
    from torch._inductor.select_algorithm import autotune_select_algorithm

    found = autotune_select_algorithm(name, choices, inputs, layout, input_gen_fns=input_gen_fns)
    return found[0] if isinstance(found, tuple) else found


def ieee_divide(dividend: Any, divisor: Any) -> Any:
    """Return the IEEE fp32 quotient of two values of Inductor's loop IR in a Triton kernel.

    Inductor's truediv becomes an approximate division there. Removable with torch 2.11, which has
    no div_rn; its fp64 quotient, rounded to fp32, is the IEEE one (53 >= 2 * 24 + 2 bits).
    """
    from torch._inductor.ops_handler import OpsHandler
    from torch._inductor.virtualized import ops

    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn(dividend, divisor)
    if torch.version.hip is None:
        return ops.inline_asm_elementwise(
            dividend, divisor, asm="div.rn.f32 $0, $1, $2;", constraints="=f,f,f"
        )
    wide = [ops.to_dtype(value, torch.float64) for value in (dividend, divisor)]
    return ops.to_dtype(ops.truediv(*wide), torch.float32)


def launch_in_graph(
    kernel: Any,
    grid: tuple[Any, Any, Any],
    arguments: dict[str, Any],
    descriptors: Mapping[str, tuple[int, ...]] | None = None,
    *,
    is_early: bool = False,
    is_first: bool = False,
) -> None:
    """Add the launch of a Triton kernel, which writes buffers among its arguments, to the graph.

    descriptors: the block of each argument that the kernel reads by tensor descriptor; is_early:
    launch it before the kernel ahead has ended, and say so in the argument PDL that it must have;
    is_first: do so only for the kernel behind it.
    Removable when Inductor offers lowerings a public way to launch a user's Triton kernel.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.ir import UserDefinedTritonKernel

    node = _early_launch(is_first) if is_early else UserDefinedTritonKernel
    node(
        kernel_idx=kernel_side_table.add_kernel(kernel),
        grid=[grid],
        tma_descriptor_metadata={
            name: ("stable", (block,)) for name, block in (descriptors or {}).items()
        },
        kernel_args={**arguments, "PDL": False},
    )


# What a first kernel gets for True: a definition of its own, which no early launch shares.
FIRST = 2


@functools.cache
def _early_launch(is_first: bool) -> Any:
    """Return the node of a launch before the kernel ahead has ended, or of the first.

    Inductor takes a kernel that waits to write all of its arguments, so that it sees one without.
    And it compiles for such a launch what has "launch_pdl" in triton_meta, which it leaves out of
    a user's kernels, so that is put into the text of the definition.
    """
    from torch._inductor.ir import UserDefinedTritonKernel

    class EarlyLaunch(UserDefinedTritonKernel):
        def codegen(self, wrapper: Any) -> None:
            self.kwargs["PDL"] = FIRST if is_first else True
            define = wrapper.define_kernel

            def define_early(name: str, body: str, *args: Any, **options: Any) -> None:
                # Where a later torch writes this otherwise, the kernel just comes in turn.
                if not is_first:
                    body = body.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
                define(name, body, *args, **options)

            wrapper.define_kernel = define_early
            try:
                super().codegen(wrapper)
            finally:
                del wrapper.define_kernel

        def can_fuse_epilogue(self) -> bool:  # that would go past codegen (torch 2.13)
            return False

    return EarlyLaunch


def inductor_launches_early() -> bool:
    """Say whether Inductor launches its own kernels so; removable when all of those wait."""
    return bool(getattr(torch._inductor.config.triton, "enable_pdl", False))
