"""Make Inductor write its CUDA source on a machine without a GPU: everything it asks is made up."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton.backends.compiler
import triton.runtime.driver
from offline import SHARED_MEMORY, facts_of
from torch._dynamo import device_interface
from torch._dynamo.source import ConstantSource
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


def _properties(arch: str) -> types.SimpleNamespace:
    major, minor = facts_of(arch).capability or (9, 0)
    return types.SimpleNamespace(
        name="made up",
        major=major,
        minor=minor,
        gcnArchName="",
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        clock_rate=1,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_MEMORY[arch],
        shared_memory_per_multiprocessor=SHARED_MEMORY[arch] + 1024,
    )


@contextlib.contextmanager
def pretend_cuda(arch: str = "sm_90") -> Iterator[None]:
    """Let torch, Inductor and Triton believe in a GPU of an architecture, for code writing only."""
    from int8moe_compile.lowerings import gpu_layer

    properties, capability = _properties(arch), facts_of(arch).capability or (9, 0)
    number = capability[0] * 10 + capability[1]
    interface = device_interface.CudaInterface
    target = triton.backends.compiler.GPUTarget("cuda", number, 32)
    driver = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *args: capability,
        "get_device_properties": lambda *args: properties,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "_lazy_init": lambda: None,
    }
    asked = {
        "get_compute_capability": lambda *args: number,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda *args: properties,
        "raise_if_triton_unavailable": lambda *args: None,
    }
    drivers = getattr(triton.runtime.driver, "driver", triton.runtime.driver)
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
        for name, value in asked.items():
            stack.enter_context(
                mock.patch.object(interface, name, staticmethod(value), create=True)
            )
        stack.enter_context(
            mock.patch.object(
                interface.Worker,
                "get_device_properties",
                staticmethod(lambda *args: properties),
            )
        )
        stack.enter_context(mock.patch.object(drivers, "_active", driver, create=True))
        # A CUDA build of torch makes a real tensor here.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda *args: None))
        facts = types.SimpleNamespace(of=lambda device: facts_of(arch))
        stack.enter_context(mock.patch.object(gpu_layer, "DeviceFacts", facts))
        # What another architecture was asked: torch keeps the answers.
        for function in vars(torch.utils._triton).values():
            getattr(function, "cache_clear", lambda: None)()
        yield


Shape = tuple[tuple[int | str, ...], torch.dtype]


def generated_source(
    function: Callable[..., Any], shapes: list[Shape], *, tokens: int, arch: str = "sm_90"
) -> str:
    """Return the wrapper that Inductor writes for a function of CUDA tensors.

    A size "T" is a symbol whose hint is tokens, "K" one whose hint is 2. Nothing is compiled,
    run or timed.
    """
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    symbols = {
        name: environment.create_symintnode(
            environment.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC),
            hint=hint,
            source=ConstantSource(name),
        )
        for name, hint in (("T", tokens), ("K", 2))
    }
    with pretend_cuda(arch), mode, torch.no_grad():
        inputs = [
            torch.empty([symbols.get(s, s) for s in size], dtype=dtype, device="cuda")
            for size, dtype in shapes
        ]
        traced = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
        with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            post_grad_passes(traced, True)
            graph = GraphLowering(
                traced, example_inputs=inputs, shape_env=environment, is_inference=True
            )
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                code = graph.codegen()[0]
    source: str = getattr(code, "value", code)
    return source


def launch_order(source: str) -> list[str]:
    """Return the kernels of a wrapper in the order of their launches, without their numbers."""
    names = re.findall(r"^\s+(\w+)\.run\(", source, re.M)
    return [re.sub(r"_\d+$", "", name) for name in names]
