"""Record the Triton launches of an eager call on CPU tensors and compile them for any target."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as OrderedDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from int8moe_compile import registry
from int8moe_compile.lowerings import (
    decode_kernels,
    eager,
    eager_kernels,
    eager_variants,
    fused_kernels,
    quantizing,
    routing_kernels,
    stream_kernels,
    variants,
    wgmma_kernels,
)
from int8moe_compile.ops.arguments import ExpertsArguments
from int8moe_compile.oracle import DeviceFacts

OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
INTEGER_INSTRUCTION = {
    "sm_80": r"mma\.sync\S*\.s32\.s8\.s8\.s32",
    "sm_86": r"mma\.sync\S*\.s32\.s8\.s8\.s32",
    "sm_89": r"mma\.sync\S*\.s32\.s8\.s8\.s32",
    "sm_90": r"(mma\.sync\S*\.s32\.s8\.s8\.s32|wgmma\.mma_async\S*\.s32\.s8\.s8)",
    "sm_100": r"(mma\.sync\S*\.s32\.s8\.s8\.s32|tcgen05\.mma\S*kind::i8)",
    "sm_120": r"mma\.sync\S*\.s32\.s8\.s8\.s32",
    "gfx942": r"v_mfma_i32_\w+",
    "gfx950": r"v_mfma_i32_\w+",
}
SHARED_MEMORY = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
    "gfx950": 163840,
}


@dataclass(frozen=True)
class Launch:
    """Keep one launch: the kernel, its arguments by name, the grid and the options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


def facts_of(arch: str) -> DeviceFacts:
    """Return made-up facts of a GPU of an architecture."""
    # What torch says of them: gfx942 has the capability (9, 4), which is not Hopper's.
    capability = {"gfx942": (9, 4), "gfx950": (9, 5)}.get(arch)
    if arch.startswith("sm_"):
        number = int(arch[3:])
        capability = (number // 10, number % 10)
    return DeviceFacts("cuda", capability, arch, SHARED_MEMORY[arch], 100)


def target_of(arch: str) -> GPUTarget:
    """Return Triton's name for an architecture."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


class _Recorder:
    def __init__(self, kernel: Any, log: list[Launch]) -> None:
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            bound = dict(zip(self.kernel.arg_names, args, strict=False), **kwargs)
            self.log.append(Launch(self.kernel, bound, options))

        return launch


def _operate(host: Any, operator: Any, *args: Any) -> None:
    """Call the kernel of an operator that has none for CPU tensors."""
    registry.product_kernel(operator.name().removeprefix("int8moe::"))(*args)


@contextmanager
def _recording(facts: DeviceFacts) -> Iterator[list[Launch]]:
    log: list[Launch] = []
    eager._layer_variant.cache_clear()
    with mock.patch.object(eager, "facts_of", lambda device: facts):
        patches = [
            mock.patch.object(eager_variants, "has_assembly", lambda device: True),
            mock.patch.object(eager_variants.EagerHost, "operate", _operate),
        ]
        modules = (eager_kernels, routing_kernels, fused_kernels, decode_kernels, quantizing)
        for module in (*modules, wgmma_kernels, stream_kernels):
            for name in dir(module):
                if name.endswith("_kernel"):
                    recorder = _Recorder(getattr(module, name), log)
                    patches.append(mock.patch.object(module, name, recorder))
        for patch in patches:
            patch.start()
        try:
            yield log
        finally:
            for patch in patches:
                patch.stop()
            eager._layer_variant.cache_clear()


def record(call: ExpertsArguments, arch: str) -> list[Launch]:
    """Return what an eager call would launch on a device of an architecture, in order."""
    with _recording(facts_of(arch)) as log:
        eager.experts(call)
    return log


def record_apart(call: ExpertsArguments, arch: str) -> list[Launch]:
    """Return what the kernels that take every call would launch, in order."""
    with _recording(facts_of(arch)) as log, variants.forced(eager.apart_variant(call)):
        eager.experts(call)
    return log


TYPES = {
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def _type_of(value: Any) -> str:
    if isinstance(value, OrderedDescriptor):
        block, layout = list(value.block_shape), repr(value.layout)
        return f"tensordesc<{TYPES[value.base.dtype]}{block},{layout}>"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_launch(launch: Launch, arch: str) -> Any:
    """Compile one recorded launch, specialised as Triton's own launcher does."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    given = launch.options | launch.arguments
    for index, parameter in enumerate(launch.kernel.params):
        value = given.get(parameter.name, parameter.default)
        is_one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        is_aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if is_aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    if launch.kernel.is_gluon():
        # By index, or they count as not given.
        constants = {
            (index,): constants[parameter.name]
            for index, parameter in enumerate(launch.kernel.params)
            if parameter.name in constants
        }
        source = GluonASTSource(launch.kernel, signature, constants, attributes)
    else:
        source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=target_of(arch), options=launch.options)


def assembly(compiled: Any) -> str:
    """Return the text in which a target's matrix instructions can be read."""
    text: str = compiled.asm.get("ptx") or compiled.asm.get("amdgcn")
    return text


def matrix_instructions(text: str) -> list[str]:
    """Return the matrix instructions of a text, each once."""
    pattern = r"wgmma\.mma_async\S*|mma\.sync\S*|tcgen05\.mma\S*|v_mfma_\w+|v_dot4\w*|dp4a\S*"
    return sorted(set(re.findall(pattern, text)))
