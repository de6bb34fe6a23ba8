"""The pass on graphs of a GPU: other casts around the routing, another device in every node."""

from __future__ import annotations

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, run
from test_families_models import BOUNDS
from test_passes_experts import Nothing

from int8moe_compile.quantization import quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "int8moe"])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
def test_experts_on_a_gpu_are_rewritten(
    name: str, implementation: str, dynamic: bool, autocast: bool
) -> None:
    kind = hf_models.experts_class(name)
    experts = quantize_(hf_models.build_experts(kind, implementation=implementation).cuda())
    inputs = [tensor.cuda() for tensor in hf_models.routed()]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        got = run(experts, *inputs, dynamic=dynamic)
        floats = run(experts, *inputs, dynamic=dynamic, experts_pass=Nothing()).result
    assert [outcome.backend for outcome in got.outcomes] == ["triton"], got.reasons
    assert len(got.calls(EXPERTS)) == 1 and not got.calls(MARKER)
    assert got.result.dtype == floats.dtype
    assert hf_models.relative_error(got.result, floats) < BOUNDS["w8a8"]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_on_a_gpu_is_rewritten(family: str) -> None:
    model = quantize_(hf_models.build_model(family).cuda())
    got = run(model, hf_models.token_ids().cuda(), use_cache=False)
    assert len(got.calls(EXPERTS)) == hf_models.LAYERS and not got.calls(MARKER)
