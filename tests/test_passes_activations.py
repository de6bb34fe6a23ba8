"""The pass on every activation of transformers, and on numbers that graphs take as inputs."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, run
from torch import Tensor, fx, nn
from transformers.activations import ACT2FN

from int8moe_compile.hf import experts_arguments
from int8moe_compile.hf.record import reason_of, record_of
from int8moe_compile.passes.capture import capture_backend
from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.quantization import quantize_

# Each name of transformers 5.10-5.24 whose function the operator has.
KNOWN = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
# Those that read a float of a module, or math.pi.
NUMBERS = ("gelu_new", "gelu_python_tanh", "gelu_accurate")


def build(word: str, name: str = "MixtralExperts", implementation: str = "grouped_mm") -> nn.Module:
    kind = hf_models.experts_class(name)
    return hf_models.build_experts(kind, implementation=implementation, hidden_act=word)


def operator(experts: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    hidden_states, ids, weights = inputs
    return torch.ops.int8moe.experts(
        hidden_states, topk_weights=weights, topk_ids=ids, **experts_arguments(experts)
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("word", sorted(KNOWN))
def test_known_activations_are_rewritten(word: str, dynamic: bool) -> None:
    experts = quantize_(build(word))
    inputs = hf_models.routed()
    got = run(experts, *inputs, dynamic=dynamic)
    assert got.reasons == [None]
    (call,) = got.calls(EXPERTS)
    assert not got.calls(MARKER)
    assert call.kwargs["activation"] == KNOWN[word]
    assert call.kwargs["alpha"] == (1.702 if word == "quick_gelu" else 1.0)
    assert torch.equal(got.result, operator(experts, inputs))


@pytest.mark.parametrize("word", sorted(set(ACT2FN) - set(KNOWN)))
def test_other_activations_are_refused_by_name(word: str) -> None:
    experts = build(word)
    with pytest.warns(UserWarning, match="left as it was"):
        quantize_(experts)
    assert record_of(experts) is None and experts.down_proj.dtype == torch.bfloat16
    assert reason_of(experts)


@pytest.mark.parametrize("word", NUMBERS)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_numbers_in_either_implementation(word: str, implementation: str) -> None:
    experts = quantize_(build(word, implementation=implementation))
    got = run(experts, *hf_models.routed(), dynamic=True)
    assert got.reasons == [None] and len(got.calls(EXPERTS)) == 1


class Block(nn.Module):
    """Use the experts' activation and two floats outside of the experts, too."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.act_fn = ACT2FN[word]
        self.multiplier = 0.75
        self.experts = build(word)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, temperature: float) -> Tensor:
        x = self.act_fn(x) * self.multiplier
        return self.experts(x, ids, weights) / temperature


def watched(module: nn.Module) -> tuple[Any, list[fx.GraphModule]]:
    """Compile for dynamic shapes; return the callable and the list that its graphs go to."""
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []
    backend = capture_backend(ExpertsPass(), graphs.append)
    return torch.compile(module, backend=backend, dynamic=True, fullgraph=True), graphs


def calls(graph: fx.GraphModule) -> int:
    return sum(node.target is EXPERTS for node in graph.graph.nodes)


@pytest.mark.parametrize("word", NUMBERS)
def test_what_callers_pass_stays_an_input(word: str) -> None:
    block = quantize_(Block(word))
    compiled, graphs = watched(block)
    inputs = hf_models.routed()
    with torch.no_grad():
        warm, hot = compiled(*inputs, 1.5), compiled(*inputs, 3.0)
    assert [calls(graph) for graph in graphs] == [1]
    assert torch.equal(warm, hot * 2)


@pytest.mark.parametrize("word", ["silu", "gelu_accurate"])
def test_floats_become_literals_only_for_layers_that_miss(word: str) -> None:
    block = quantize_(Block(word))
    compiled, graphs = watched(block)
    inputs = hf_models.routed()
    with torch.no_grad():
        compiled(*inputs, 1.5)
        block.multiplier = 0.5
        compiled(*inputs, 1.5)
    assert [calls(graph) for graph in graphs] == ([1] if word == "silu" else [1, 1])


def test_a_changed_number_is_no_longer_the_operator() -> None:
    experts = quantize_(build("gelu_accurate"))
    compiled, graphs = watched(experts)
    inputs = hf_models.routed()
    with torch.no_grad():
        before = compiled(*inputs)
        experts.act_fn.precomputed_constant = 0.5
        after = compiled(*inputs)
    assert [calls(graph) for graph in graphs] == [1, 0]
    assert hf_models.relative_error(after, before) > 0.05
