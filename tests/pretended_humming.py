"""Graphs of CUDA tensors that do not exist, rewritten for humming; see pretended.py."""

from __future__ import annotations

from typing import Any

import fake_humming
import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, run
from pretended import guard, no_gpu, on_cuda  # noqa: F401  (guard is a fixture)
from support import problem

from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.quantization import quantize_

HUMMING = torch.ops.int8moe.humming_experts.default


def rewritten(name: str, scheme: str = "w8a8", **options: Any) -> Any:
    """Compile a class of experts with the pass that has to take humming."""
    experts = hf_models.build_experts(hf_models.experts_class(name), dtype=torch.bfloat16)
    quantize_(experts, scheme)
    inputs = hf_models.routed(dtype=torch.bfloat16)
    with fake_humming.installed() as fake, no_gpu():
        on_cuda(experts)
        given = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in inputs]
        got = run(experts, *given, experts_pass=ExpertsPass("humming"), **options)
    assert not fake.conversions, "tracing converts nothing"
    return got


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_pass_writes_its_operator(dynamic: bool) -> None:
    got = rewritten("Qwen3MoeExperts", dynamic=dynamic)
    assert [outcome.backend for outcome in got.outcomes] == ["humming"]
    assert len(got.calls(HUMMING)) == 1
    assert not got.calls(EXPERTS) and not got.calls(MARKER)
    assert got.result.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "scheme", "word"),
    [
        ("GptOssExperts", "w8a8", "without bias"),
        ("NemotronHExperts", "w8a8", "gated silu"),
        ("Qwen3MoeExperts", "w8a16", "dynamic per token"),
        ("Qwen3MoeExperts", "w8a8_tensor", "per channel"),
    ],
)
def test_what_it_cannot_run_is_an_error(name: str, scheme: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"'humming' cannot run this problem.*{word}"):
        rewritten(name, scheme)


def test_what_only_its_operator_refuses_is_an_error() -> None:
    """One weight per channel, the other per tensor: the oracle is asked with the finer key."""
    experts: Any = hf_models.build_experts(hf_models.experts_class("Qwen3MoeExperts"))
    quantize_(experts)
    coarse = torch.ones(hf_models.EXPERTS, 1)
    experts.down_proj_scale = torch.nn.Parameter(coarse, requires_grad=False)
    inputs = hf_models.routed()
    with fake_humming.installed(), no_gpu():
        on_cuda(experts)
        given = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in inputs]
        with pytest.raises(ValueError, match=r"w2_scale: wanted one value a row, shape \[8, 64\]"):
            run(experts, *given, experts_pass=ExpertsPass("humming"))
        quiet = run(experts, *given, experts_pass=ExpertsPass("humming", raises=False))
    assert "w2_scale: wanted" in str(quiet.reasons[0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_operator_itself_is_traced(dynamic: bool) -> None:
    case = problem(1, T=7, H=64, I=48)
    with no_gpu():
        args = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in case.args]
        got = run(lambda *given: HUMMING(*given) + 1, *args, dynamic=dynamic)
    assert len(got.calls(HUMMING)) == 1
    assert got.result.shape == (7, 64) and got.result.device.type == "cuda"


def test_its_refusals_come_at_trace_time() -> None:
    case = problem(1, T=7, H=64, I=40)
    with no_gpu(), pytest.raises(Exception, match="w2: wanted rows of a multiple of 16 codes"):
        args = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in case.args]
        run(lambda *given: HUMMING(*given), *args)
