"""The pass on graphs of CUDA tensors, under CUDA's own autocast, without a GPU: nothing runs.

Its own process: PyTorch's device guard for CUDA is replaced for good by one that does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
from inductor_source import pretend_cuda
from passes_support import EXPERTS, MARKER, run
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from int8moe_compile import demo
from int8moe_compile.hf import find_experts
from int8moe_compile.lowerings.cpu_build import find_compiler
from int8moe_compile.passes import capture
from int8moe_compile.quantization import quantize_

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import export_package

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let Python's indexing of CUDA tensors do without a driver."""
    root = Path(torch.__file__).parent
    source = tmp_path_factory.mktemp("guard") / "guard.cpp"
    source.write_text(GUARD)
    library = source.with_suffix(".so")
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
    subprocess.run([*find_compiler(), str(source), "-o", str(library), *options], check=True)
    ctypes.CDLL(str(library))


def _not_run(keep: Any) -> Any:
    """Take the place of capture's compiler: keep the graph and make nothing of it."""

    def compile_graph(gm: fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        keep(gm)
        (returned,) = gm.graph.output_node().args
        results = [node.meta["val"] for node in returned]

        def call(inputs: list[Any]) -> Any:
            inputs.clear()
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return compile_graph


@contextlib.contextmanager
def no_gpu() -> Iterator[None]:
    """Let torch.compile go as far as the joint graph of CUDA tensors that do not exist."""
    state = torch.zeros(16, dtype=torch.uint8)
    patches = (
        mock.patch("torch.cuda.get_rng_state", lambda *args: state),
        mock.patch("torch.cuda.set_rng_state", lambda *args: None),
        mock.patch.object(capture, "_inner_compile", _not_run),
        # What stands behind the pass traces attention on real tensors and folds constants.
        mock.patch("torch._inductor.fx_passes.joint_graph.lazy_init", lambda *args: None),
        torch._inductor.config.patch(joint_graph_constant_folding=False),
        pretend_cuda(),
        FakeTensorMode(shape_env=ShapeEnv()),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def on_cuda(module: nn.Module) -> nn.Module:
    """Replace what a module holds by fake CUDA tensors of the same shapes."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(fake(parameter), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake(buffer)
    return module


@dataclass(frozen=True)
class Case:
    """State an experts class, how it runs, and the dtypes of weights, tokens and autocast."""

    name: str
    implementation: str
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None] = (BF16, BF16, BF16)
    dynamic: bool = False
    activation: str = ""

    def __str__(self) -> str:
        kinds = "-".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        shapes = "dynamic" if self.dynamic else "static"
        parts = (self.name, self.activation, self.implementation, kinds, shapes)
        return "-".join(part for part in parts if part)


MIXED = ((BF16, FP32, BF16), (FP32, FP32, BF16), (FP16, FP16, FP16), (FP32, FP16, FP16))
CASES = [
    case
    for implementation in ("grouped_mm", "batched_mm")
    for case in (
        Case("Qwen3MoeExperts", implementation),
        Case("GptOssExperts", implementation),
        *(Case("NemotronHExperts", implementation, dynamic=dynamic) for dynamic in (False, True)),
        # CUDA's autocast takes powers in fp32: NemotronH's gate, and this.
        Case("Qwen3MoeExperts", implementation, activation="gelu_new"),
        Case("GptOssExperts", implementation, (BF16, BF16, None)),
        *(Case("NemotronHExperts", implementation, dtypes) for dtypes in MIXED),
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_are_rewritten_under_autocast(case: Case) -> None:
    dtype, hidden, autocast = case.dtypes
    options = {"hidden_act": case.activation} if case.activation else {}
    experts = hf_models.build_experts(
        hf_models.experts_class(case.name),
        implementation=case.implementation,
        dtype=dtype,
        **options,
    )
    quantize_(experts)
    inputs = hf_models.routed(dtype=hidden)
    with no_gpu():
        on_cuda(experts)
        given = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in inputs]
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            got = run(experts, *given, dynamic=case.dynamic)
    assert [outcome.backend for outcome in got.outcomes] == ["triton"], got.reasons
    assert len(got.calls(EXPERTS)) == 1 and not got.calls(MARKER)
    assert got.result.dtype == hidden


def test_a_model_is_exported() -> None:
    # Attention on CUDA compares sizes in a way that torch 2.11 cannot prove.
    model = quantize_(demo.load("cpu"))
    with no_gpu():
        program = export_package.export(on_cuda(model), demo.CONTEXT)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(MARKER) == 2 * len(list(find_experts(model)))
