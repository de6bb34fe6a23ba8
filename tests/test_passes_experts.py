"""The pass on experts modules alone: every structure, dtype, size and activation, never wrong."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, Captured, run
from torch import Tensor, nn

from int8moe_compile.hf import experts_arguments
from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.quantization import quantize_

STRUCTURES = (
    "Qwen3MoeExperts",  # default
    "Gemma4TextExperts",  # gelu_tanh
    "DeepseekV4Experts",  # clamped
    "MiniMaxM3VLExperts",  # clamped, alpha and beta
    "GptOssExperts",  # the same, interleaved, transposed, with bias
    "OpenAIPrivacyFilterExperts",  # the same, halves apart
    "NemotronHExperts",  # not gated, relu2
)
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
# Operators of either implementation, and those that wait for the host.
GONE = ("grouped_mm", "bmm", "sort", "histc", "bincount", "item", "nonzero", "unique")


def build(name: str, implementation: str = "grouped_mm", **options: Any) -> nn.Module:
    kind = hf_models.experts_class(name)
    return quantize_(hf_models.build_experts(kind, implementation=implementation, **options))


def eager(experts: nn.Module, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Call the operator with the module's own arguments."""
    return torch.ops.int8moe.experts(
        hidden_states, topk_weights=weights, topk_ids=ids, **experts_arguments(experts)
    )


def assert_rewritten(
    experts: nn.Module, inputs: tuple[Tensor, ...], *, dynamic: bool | None = False
) -> Captured:
    """Expect one call of the operator, nothing left of the old code, and the operator's bits."""
    got = run(experts, *inputs, dynamic=dynamic)
    assert [outcome.rewritten for outcome in got.outcomes] == [True], got.reasons
    assert len(got.calls(EXPERTS)) == 1
    assert not got.calls(MARKER)
    assert not [name for name in got.operators for gone in GONE if f".{gone}" in name]
    assert torch.equal(got.result, eager(experts, *inputs))
    return got


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_each_structure_is_rewritten(name: str, implementation: str, dynamic: bool) -> None:
    got = assert_rewritten(build(name, implementation), hf_models.routed(), dynamic=dynamic)
    (call,) = got.calls(EXPERTS)
    ids = next(node for node in got.graphs[0].graph.nodes if node is call.args[6])
    assert ids.op == "placeholder" and ids.meta["val"].dtype == torch.int64
    # Running the pass again finds nothing to do.
    before = str(got.graphs[0].graph)
    ExpertsPass()(got.graphs[0].graph)
    assert str(got.graphs[0].graph) == before


@pytest.mark.parametrize(
    ("dtype", "router"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dtypes_of_weights_and_router(
    implementation: str, dtype: torch.dtype, router: torch.dtype
) -> None:
    experts = build("MixtralExperts", implementation, dtype=dtype)
    hidden_states, ids, weights = hf_models.routed(dtype=dtype)
    assert_rewritten(experts, (hidden_states, ids, weights.to(router)))


def test_hidden_states_of_another_dtype_than_the_weights() -> None:
    hidden_states, ids, weights = hf_models.routed(dtype=torch.float32)
    assert_rewritten(build("MixtralExperts"), (hidden_states, ids, weights))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_token(implementation: str, dynamic: bool) -> None:
    experts = build("MixtralExperts", implementation)
    assert_rewritten(experts, hf_models.routed(1), dynamic=dynamic)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_expert_a_token_and_narrow_ids(implementation: str) -> None:
    hidden_states, ids, weights = hf_models.routed()
    one = (hidden_states, ids[:, :1].to(torch.int32), weights[:, :1])
    assert_rewritten(build("MixtralExperts", implementation), one)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sizes_that_coincide(implementation: str) -> None:
    """Tokens, experts and widths of one number: shapes alone cannot tell the roles apart."""
    experts = build("NemotronHExperts", implementation, hidden_size=8, moe_intermediate_size=8)
    hidden_states = torch.randn(8, 8, dtype=torch.bfloat16)
    ids = torch.arange(64).reshape(8, 8) % 8
    assert_rewritten(experts, (hidden_states, ids, torch.rand(8, 8)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sentinel_ids_give_zero_rows_before_and_after(implementation: str) -> None:
    experts = build("MixtralExperts", implementation)
    hidden_states, ids, weights = hf_models.routed()
    ids[2], weights[2] = hf_models.EXPERTS, 0.0
    got = assert_rewritten(experts, (hidden_states, ids, weights))
    assert not got.result[2].any()
    assert not run(experts, hidden_states, ids, weights, experts_pass=Nothing()).result[2].any()
    assert (ids[2] == hf_models.EXPERTS).all()


class Nothing(ExpertsPass):
    """Leave every graph as it is."""

    def __call__(self, graph: Any) -> None:
        return


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_of_the_gate_come_from_the_model(dynamic: bool) -> None:
    experts = build("GptOssExperts")
    for limit, alpha in ((7.0, 1.702), (3, 1.25)):
        experts.limit, experts.alpha = limit, alpha
        (call,) = run(experts, *hf_models.routed(), dynamic=dynamic).calls(EXPERTS)
        assert (call.kwargs["limit"], call.kwargs["alpha"], call.kwargs["beta"]) == (
            float(limit),
            float(alpha),
            1.0,
        )


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_tensor", "w8a8_static", "w8a16"])
def test_schemes_reach_the_operator(scheme: str) -> None:
    kind = hf_models.experts_class("MixtralExperts")
    inputs = hf_models.routed()
    calibration = [inputs] if scheme == "w8a8_static" else None
    experts = quantize_(hf_models.build_experts(kind), scheme, calibration=calibration)
    got = assert_rewritten(experts, inputs)
    (call,) = got.calls(EXPERTS)
    word = {"w8a8": "token", "w8a8_tensor": "tensor", "w8a8_static": "static", "w8a16": "none"}
    assert call.kwargs["activation_quant"] == word[scheme]
    assert ("a13_scale" in call.kwargs) == (scheme == "w8a8_static")
    # Weight-only: nothing of the weights' size in floating point anywhere in the graph.
    size = experts.down_proj.numel()
    assert not [
        node
        for node in got.graphs[0].graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
        and node.meta["val"].is_floating_point()
        and node.meta["val"].numel() >= size
    ]


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast(implementation: str, dtype: torch.dtype, hidden: torch.dtype) -> None:
    experts = build("GptOssExperts", implementation, dtype=dtype)
    inputs = hf_models.routed(dtype=hidden)
    with torch.autocast("cpu", torch.bfloat16):
        got = assert_rewritten(experts, inputs)
        floats = run(experts, *inputs, experts_pass=Nothing()).result
    assert got.result.dtype == floats.dtype == hidden
    assert (got.result - floats).norm() < 0.02 * floats.norm()


@pytest.mark.slow
def test_all_decorated_classes_of_transformers() -> None:
    """One call each, grouped and static: the list of structures above is not the limit."""
    inputs = hf_models.routed()
    left = {}
    for kind in hf_models.experts_classes():
        got = run(quantize_(hf_models.build_experts(kind)), *inputs)
        if len(got.calls(EXPERTS)) != 1:
            left[kind.name] = got.reasons
    assert not left
