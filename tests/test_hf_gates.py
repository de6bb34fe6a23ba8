"""Recognition of the gate: by value alone, never silu by default, and live."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import hf_models
import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from int8moe_compile.hf import experts_arguments, reason_of, record_of
from int8moe_compile.hf.gates import UnknownGateError, recognise_gate
from int8moe_compile.quantization import quantize_
from int8moe_compile.structure import Gate


class Gated(nn.Module):
    """A module with nothing but a gate."""

    has_gate = True

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self._apply_gate = types.MethodType(function, self)
        for name, value in attributes.items():
            setattr(self, name, value)


def plain(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def clamped(self: Any, h: Tensor) -> Tensor:
    gate, up = h[..., ::2], h[..., 1::2]
    gate = gate.clamp(max=self.ceiling)
    return gate * torch.sigmoid(gate * self.slope) * (up.clamp(-self.ceiling, self.ceiling) + 1)


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("silu", Gate()),
        ("swish", Gate()),
        ("gelu", Gate("gelu")),
        ("gelu_python", Gate("gelu")),
        ("gelu_pytorch_tanh", Gate("gelu_tanh")),
        ("gelu_new", Gate("gelu_tanh")),
        ("gelu_fast", Gate("gelu_tanh")),
        ("quick_gelu", Gate(alpha=1.702)),
        ("relu", Gate("relu")),
        ("relu2", Gate("relu2")),
    ],
)
def test_activation_by_value(name: str, gate: Gate) -> None:
    assert recognise_gate(Gated(plain, act_fn=ACT2FN[name])).gate == gate


@pytest.mark.parametrize("limit", [0.5, 7.0, 10.0, 123.0])
@pytest.mark.parametrize("alpha", [1.0, 1.702, 0.3])
def test_clamp_slope_and_interleaving(limit: float, alpha: float) -> None:
    found = recognise_gate(Gated(clamped, ceiling=limit, slope=alpha))
    assert found.gate == Gate("silu", alpha, 1.0, limit)
    assert found.interleaved
    assert dict(found.reads) == {"ceiling": limit, "slope": alpha}


def test_hard_coded_limit() -> None:
    def gate(self: Any, h: Tensor) -> Tensor:
        g, u = h.chunk(2, dim=-1)
        return torch.relu(g.clamp(max=3.25)) * u.clamp(-3.25, 3.25)

    assert recognise_gate(Gated(gate)).gate == Gate("relu", limit=3.25)


def test_infinite_limit_is_none() -> None:
    found = recognise_gate(Gated(clamped, ceiling=float("inf"), slope=1.0))
    assert found.gate == Gate("silu", 1.0, 1.0, None)


def clamp_after(self: Any, h: Tensor) -> Tensor:
    g, u = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0)


def clamp_below(self: Any, h: Tensor) -> Tensor:
    g, u = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0)


def one_clamp(self: Any, h: Tensor) -> Tensor:
    g, u = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(g) * u.clamp(-7.0, 7.0)


def swapped(self: Any, h: Tensor) -> Tensor:
    u, g = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(g) * u


def failing(self: Any, h: Tensor) -> Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (clamp_after, "no clamped or plain product"),
        (clamp_below, "no clamped or plain product"),
        (one_clamp, "no clamped or plain product"),
        (swapped, "up rows first"),
        (failing, "no such kernel"),
    ],
)
def test_refused_gate(gate: Callable[[Any, Tensor], Tensor], reason: str) -> None:
    with pytest.raises(UnknownGateError, match=reason):
        recognise_gate(Gated(gate))


@pytest.mark.parametrize("name", ["tanh", "mish", "leaky_relu", "relu6", "linear"])
def test_refused_activation(name: str) -> None:
    with pytest.raises(UnknownGateError):
        recognise_gate(Gated(plain, act_fn=ACT2FN[name]))


@pytest.mark.parametrize(
    ("act", "activation"),
    [("gelu_pytorch_tanh", "gelu_tanh"), ("gelu", "gelu"), ("relu2", "relu2"), ("silu", "silu")],
)
def test_model_with_another_activation(act: str, activation: str) -> None:
    model = hf_models.build_model("qwen3_moe", hidden_act=act)
    experts = model.model.layers[0].mlp.experts
    inputs = hf_models.routed()
    wanted = experts(*inputs)
    quantize_(model)
    assert experts_arguments(experts)["activation"] == activation
    assert hf_models.relative_error(experts(*inputs), wanted) < 0.03


@pytest.mark.parametrize("kind", ["tanh", "swapped"])
def test_model_with_unknown_gate_is_left_alone(kind: str) -> None:
    options = {"hidden_act": "tanh"} if kind == "tanh" else {}
    model = hf_models.build_model("mixtral", **options)
    experts = [layer.mlp.experts for layer in model.model.layers]
    if kind == "swapped":
        for module in experts:
            module._apply_gate = types.MethodType(swapped, module)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = hf_models.token_ids()
    logits = model(ids).logits
    with pytest.warns(UserWarning, match="left as it was") as caught:
        quantize_(model)
    assert len(caught) == 1
    assert "model.layers.0.mlp.experts" in str(caught[0].message)
    for module in experts:
        assert record_of(module) is None
        assert "gate" in (reason_of(module) or "")
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize(
    ("name", "limit", "alpha"),
    [
        ("GptOssExperts", "limit", "alpha"),
        ("MiniMaxM3VLExperts", "swiglu_limit", "swiglu_alpha"),
        ("DeepseekV4Experts", "limit", None),
    ],
)
def test_changed_limit_changes_the_operators_argument(
    name: str, limit: str, alpha: str | None
) -> None:
    experts = hf_models.build_experts(hf_models.experts_class(name))
    quantize_(experts)
    inputs = hf_models.routed()
    before = experts(*inputs)
    setattr(experts, limit, 0.25)
    if alpha is not None:
        setattr(experts, alpha, 1.25)
    arguments = experts_arguments(experts)
    assert arguments["limit"] == 0.25
    assert arguments["alpha"] == (1.0 if alpha is None else 1.25)
    after = experts(*inputs)
    experts.config._experts_implementation = "grouped_mm"
    assert hf_models.relative_error(after, experts(*inputs)) < 0.03
    assert hf_models.relative_error(after, before) > 0.1


def test_changed_activation_is_honoured_or_runs_transformers_code() -> None:
    experts = hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
    quantize_(experts)
    inputs = hf_models.routed()
    experts.act_fn = ACT2FN["relu"]
    assert experts_arguments(experts)["activation"] == "relu"
    experts.act_fn = ACT2FN["tanh"]
    with pytest.raises(UnknownGateError):
        experts_arguments(experts)
    result = experts(*inputs)
    experts.config._experts_implementation = "grouped_mm"
    assert torch.equal(result, experts(*inputs))
