"""Every accepted layer of real architectures becomes one int8moe.experts, with eager's results."""

from __future__ import annotations

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, run
from torch import Tensor, nn

from int8moe_compile.hf import find_experts
from int8moe_compile.passes.capture import capture_backend
from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.quantization import quantize_

FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    "nemotron_h",
)
# Operators of grouped_mm (attention may hold bmm), and of routing that waits for the host.
GONE = ("grouped_mm", "histc", "bincount", "item", "nonzero", "unique", "_local_scalar")


def eager_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Run the operator eagerly in every layer."""
    model.set_experts_implementation("int8moe")
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def assert_rewritten(model: nn.Module, implementation: str, *, dynamic: bool) -> None:
    ids = hf_models.token_ids()
    wanted = eager_logits(model, ids)
    model.set_experts_implementation(implementation)
    names = [name for name, _ in find_experts(model)]
    got = run(model, ids, use_cache=False, dynamic=dynamic)
    assert len(got.graphs) == 1
    assert len(got.calls(EXPERTS)) == len(names) == hf_models.LAYERS
    assert not got.calls(MARKER)
    assert not [name for name in got.operators for gone in GONE if gone in name.split(".")[-2:]]
    assert [(o.name, o.rewritten, o.backend) for o in got.outcomes] == [
        (name, True, "cpu") for name in names
    ]
    # Both run the same operator; what is around it is fp32 here and bf16 there.
    torch.testing.assert_close(got.result.logits, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_one_experts_call(family: str) -> None:
    assert_rewritten(quantize_(hf_models.build_model(family)), "grouped_mm", dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "int8moe"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_one_experts_call_in_every_way(
    family: str, implementation: str, dynamic: bool
) -> None:
    assert_rewritten(quantize_(hf_models.build_model(family)), implementation, dynamic=dynamic)


@pytest.mark.slow
def test_generate_rewrites_prefill_and_decode() -> None:
    model = quantize_(hf_models.build_model("qwen3_moe"))
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    backend = capture_backend(ExpertsPass(), graphs.append)
    model.forward = torch.compile(model.forward, backend=backend)
    model.generate(hf_models.token_ids(1, 8), max_new_tokens=8, do_sample=False)
    assert 2 <= len(graphs) <= 3
    for graph in graphs:
        calls = [node for node in graph.graph.nodes if node.target is EXPERTS]
        assert len(calls) == hf_models.LAYERS


def test_with_the_pass_off_nothing_is_rewritten() -> None:
    model = quantize_(hf_models.build_model("qwen3_moe"))
    ids = hf_models.token_ids()
    graphs: list[torch.fx.GraphModule] = []
    logits = []
    for experts_pass in (None, ExpertsPass(), None):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=capture_backend(experts_pass, graphs.append))
        with torch.no_grad():
            logits.append(compiled(ids, use_cache=False).logits)
    counts = [sum(node.target is EXPERTS for node in graph.graph.nodes) for graph in graphs]
    assert counts == [0, hf_models.LAYERS, 0]
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[1])
