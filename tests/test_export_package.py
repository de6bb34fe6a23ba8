"""torch.export and AOTInductor: INT8 experts in one file that a fresh process runs."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from torch import Tensor, fx, nn

import int8moe_compile
from int8moe_compile import demo
from int8moe_compile.hf import find_experts
from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.quantization import quantize_

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import export_package  # noqa: E402

# What a user's own process does: no transformers, no model code.
FRESH = """
import sys, torch
{imports}
package, given, result = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
torch.save([model(*inputs) for inputs in torch.load(given)], result)
assert "transformers" not in sys.modules
"""


class _Stopped(Exception):
    """Leave AOTInductor behind the graph pass."""


class _StoppingPass(ExpertsPass):
    """Run the pass and make no code of its graph."""

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        raise _Stopped


def outcomes(program: Any, path: Path) -> list[Any]:
    """Package a program as far as the graph pass."""
    experts_pass = _StoppingPass()
    with (
        torch._inductor.config.patch(joint_custom_pre_pass=experts_pass),
        pytest.raises(_Stopped),
    ):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return [(outcome.name, outcome.rewritten, outcome.reason) for outcome in experts_pass.outcomes]


def exported(experts: nn.Module) -> Any:
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    return torch.export.export(
        experts, hf_models.routed(), dynamic_shapes=[{0: tokens}] * 3, strict=False
    )


def run_fresh(package: Path, inputs: list[tuple[Tensor, ...]], imports: str) -> Any:
    """Run a package in a new process; return the results, or what the process said."""
    given, result = package.with_suffix(".in"), package.with_suffix(".out")
    torch.save(inputs, given)
    script = FRESH.format(imports=imports)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, str(package), str(given), str(result)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    failure = f"exit status {done.returncode}: {done.stderr}"
    return torch.load(result) if done.returncode == 0 else failure


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts"])
def test_exported_experts_are_rewritten(name: str, implementation: str, tmp_path: Path) -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class(name)))
    experts.config._experts_implementation = implementation
    program = exported(experts)
    asserted = [n for n in program.graph.nodes if "_assert_tensor_metadata" in str(n.target)]
    assert asserted, "export guards casts; the pass has to see through that"
    assert outcomes(program, tmp_path / "experts.pt2") == [("", True, None)]


def test_decompositions_keep_the_operator() -> None:
    class Call(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return torch.ops.int8moe.experts(*tensors)

    experts = quantize_(hf_models.build_experts(hf_models.experts_class("MixtralExperts")))
    hidden_states, ids, weights = hf_models.routed()
    w13, w2 = experts.gate_up_proj, experts.down_proj
    given = (hidden_states, w13, experts.gate_up_proj_scale, w2, experts.down_proj_scale)
    program = torch.export.export(Call(), (*given, weights, ids)).run_decompositions()
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.int8moe.experts.default) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
def test_packaged_experts_run_in_a_fresh_process(name: str, tmp_path: Path) -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class(name)))
    package = tmp_path / "experts.pt2"
    with int8moe_compile.enabled():
        torch._inductor.aoti_compile_and_package(exported(experts), package_path=str(package))
    inputs = [hf_models.routed(tokens) for tokens in (1, 7, 4096)]
    results = run_fresh(package, inputs, "import int8moe_compile")
    assert isinstance(results, list), results
    for given, result in zip(inputs, results, strict=True):
        assert torch.equal(result, experts(*given))
    message = run_fresh(package, inputs, "")
    assert "Could not find schema for int8moe::experts" in message


CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=CUDA)]
)
def test_packaged_demo_model_has_the_same_perplexity(device: str, tmp_path: Path) -> None:
    model = quantize_(demo.load(device))
    names = [name for name, _ in find_experts(model)]
    package = tmp_path / "demo.pt2"
    program = export_package.export(model, demo.CONTEXT)
    assert outcomes(program, package) == [(f"model.{name}", True, None) for name in names]
    export_package.package(model, package, demo.CONTEXT)
    rows, _ = demo.split_windows(demo.held_out_windows(), 4)
    rows = rows.to(device)
    # Contiguous, because a package reads its inputs with the strides of the example, unchecked.
    inputs = [(rows[:, :-1].contiguous(),), (rows[:1, :33].contiguous(),)]
    results = run_fresh(package, inputs, "import int8moe_compile")
    assert isinstance(results, list), results
    with torch.inference_mode():
        eager = model(input_ids=rows[:, :-1], use_cache=False).logits
    count = rows[:, 1:].numel()
    perplexity, wanted = (
        math.exp(demo.negative_log_likelihood(logits, rows[:, 1:]) / count)
        for logits in (results[0], eager)
    )
    print(f"{device}: perplexity of the package {perplexity:.4f}, of eager INT8 {wanted:.4f}")
    # Inductor keeps intermediates that eager rounds to bf16 in fp32; int8 noise itself is 0.5 %.
    assert perplexity == pytest.approx(wanted, rel=2e-3)
    assert results[1].shape == (1, 33, model.config.vocab_size)
