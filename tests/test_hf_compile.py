"""Quantised models under Dynamo: one graph, two markers a layer, numbers as literals."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from torch import nn

from int8moe_compile.hf import find_experts
from int8moe_compile.quantization import quantize_

MARKER = torch.ops.int8moe.dequantize


class Capture:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def markers(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and node.target in (MARKER, MARKER.default)
    ]


def compiled(model: nn.Module, dynamic: bool) -> tuple[Any, Capture]:
    capture = Capture()
    return torch.compile(model, backend=capture, fullgraph=True, dynamic=dynamic), capture


# Every family once (the slow ones share their experts' code with the others), every
# implementation and kind of shapes twice.
QUICK = ("qwen3_moe", "gpt_oss", "nemotron_h")
CASES = [
    pytest.param(family, "int8moe", True, marks=() if family in QUICK else pytest.mark.slow)
    for family in hf_models.FAMILIES
] + [
    pytest.param(family, implementation, dynamic)
    for family in ("qwen3_moe", "gpt_oss")
    for implementation, dynamic in (("grouped_mm", False), ("batched_mm", True))
]


@pytest.mark.parametrize(("family", "implementation", "dynamic"), CASES)
def test_one_graph_with_two_markers_a_layer(
    family: str, implementation: str, dynamic: bool
) -> None:
    model = quantize_(hf_models.build_model(family))
    model.set_experts_implementation(implementation)
    names = [name for name, _ in find_experts(model)]
    call, capture = compiled(model, dynamic)
    ids = hf_models.token_ids()
    with torch.no_grad():
        logits = call(ids, use_cache=False).logits
        eager = "grouped_mm" if implementation == "int8moe" else implementation
        model.set_experts_implementation(eager)
        assert torch.equal(logits, model(ids, use_cache=False).logits)
    (graph,) = capture.graphs
    found = markers(graph)
    assert len(found) == 2 * len(names) == 2 * hf_models.LAYERS
    for node, name in zip(found, [name for name in names for _ in range(2)], strict=True):
        assert node.kwargs["activation_quant"] == "token"
        assert node.kwargs["dtype"] == torch.bfloat16
        paths = [path for path, _ in node.meta["nn_module_stack"].values()]
        assert any(path.endswith(name) for path in paths), paths


@pytest.mark.parametrize("scheme", ["w8a8_tensor", "w8a8_static", "w8a16"])
def test_markers_carry_the_scheme(scheme: str) -> None:
    model = hf_models.build_model("gpt_oss")
    ids = hf_models.token_ids()
    calibration = [ids] if scheme == "w8a8_static" else None
    quantize_(model, scheme, calibration=calibration)
    call, capture = compiled(model, False)
    with torch.no_grad():
        call(ids)
    word = {"w8a8_tensor": "tensor", "w8a8_static": "static", "w8a16": "none"}[scheme]
    for node in markers(capture.graphs[0]):
        assert node.kwargs["activation_quant"] == word
        assert (node.kwargs["a_scale"] is not None) == (word == "static")


def clamps(graph: torch.fx.GraphModule) -> set[Any]:
    """Return every bound that a clamp of the graph's gates uses."""
    bounds = set()
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target == "clamp":
            bounds |= {value for value in node.kwargs.values() if value is not None}
    return bounds


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["GptOssExperts", "DeepseekV4Experts", "MiniMaxM3VLExperts"])
def test_limits_are_literals_and_a_changed_one_recompiles(name: str, dynamic: bool) -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class(name)))
    attribute = "swiglu_limit" if hasattr(experts, "swiglu_limit") else "limit"
    limit = getattr(experts, attribute)
    call, capture = compiled(experts, dynamic)
    inputs = hf_models.routed()
    call(*inputs)
    assert clamps(capture.graphs[0]) == {limit, -limit}
    doubles = [
        node
        for node in capture.graphs[0].graph.nodes
        if node.op == "placeholder"
        and getattr(node.meta["example_value"], "dtype", None) == torch.float64
    ]
    assert not doubles
    setattr(experts, attribute, 0.25)
    result = call(*inputs)
    assert clamps(capture.graphs[-1]) == {0.25, -0.25}
    experts.config._experts_implementation = "grouped_mm"
    assert torch.equal(result, experts(*inputs))


def test_one_graph_for_many_lengths() -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class("GptOssExperts")))
    call, capture = compiled(experts, True)
    for tokens in (7, 13, 300):
        call(*hf_models.routed(tokens))
    assert len(capture.graphs) == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts"])
def test_export(name: str, strict: bool) -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class(name)))
    inputs = hf_models.routed()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(experts, inputs, dynamic_shapes=[{0: tokens}] * 3, strict=strict)
    nodes = [node for node in program.graph.nodes if node.target is MARKER.default]
    assert len(nodes) == 2
    other = hf_models.routed(31)
    experts.config._experts_implementation = "grouped_mm"
    assert torch.equal(program.module()(*other), experts(*other))


def test_quantising_a_compiled_model_recompiles_it() -> None:
    model = hf_models.build_model("mixtral")
    call, capture = compiled(model, False)
    ids = hf_models.token_ids()
    with torch.no_grad():
        call(ids)
        assert not markers(capture.graphs[0])
        quantize_(call, skip="model.layers.1.*")
        call(ids)
    assert len(capture.graphs) == 2
    assert len(markers(capture.graphs[1])) == 2


def test_training_graph_keeps_transformers_code_and_gradient() -> None:
    # bf16, because transformers' fp32 code has no traceable backward, quantised or not.
    experts = quantize_(hf_models.build_experts(hf_models.experts_class("Qwen3MoeExperts")))
    hidden_states, ids, weights = hf_models.routed()
    gradients = []
    for call in (torch.compile(experts, backend="aot_eager", fullgraph=True), experts):
        x = hidden_states.clone().requires_grad_()
        call(x, ids, weights).sum().backward()
        gradients.append(x.grad)
    assert hf_models.relative_error(*gradients) < torch.finfo(torch.bfloat16).eps
