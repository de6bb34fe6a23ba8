"""Gates as a later model may write them: rewritten whatever runs in fp32 and however rows lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from passes_support import EXPERTS, MARKER, run
from torch import Tensor, nn

from int8moe_compile.hf import experts_arguments, reason_of, record_of
from int8moe_compile.quantization import quantize_


def halves(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(h.dtype)


def rows(self: Any, h: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(h.dtype)


def activation(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.float()).to(h.dtype) * up


def clamped(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    gate, up = gate.float().clamp(max=2.5), up.float().clamp(min=-2.5, max=2.5)
    return ((up + 1) * (gate * torch.sigmoid(gate * 1.702))).to(h.dtype)


def alternating(self: Any, h: Tensor) -> Tensor:
    gate, up = h[..., ::2].float(), h[..., 1::2].float()
    return (F.silu(gate) * up).to(h.dtype)


def experts_with(gate: Callable[[Any, Tensor], Tensor], dtype: torch.dtype) -> nn.Module:
    """Build experts of Mixtral with another gate."""
    kind = hf_models.experts_class("MixtralExperts")
    experts = hf_models.build_experts(kind, dtype=dtype)
    experts.__class__ = type("OtherExperts", (type(experts),), {"_apply_gate": gate})
    return experts


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        (torch.bfloat16, "grouped_mm"),
        (torch.bfloat16, "batched_mm"),
        (torch.float16, "grouped_mm"),
        (torch.float32, "batched_mm"),
    ],
)
@pytest.mark.parametrize("gate", [halves, rows, activation, clamped, alternating])
def test_gate_in_fp32_is_rewritten(
    gate: Callable[[Any, Tensor], Tensor], dtype: torch.dtype, implementation: str
) -> None:
    original = experts_with(gate, dtype)
    inputs = hf_models.routed(dtype=dtype)
    wanted = original(*inputs)
    experts = quantize_(original)
    record = record_of(experts)
    assert record is not None, reason_of(experts)
    assert record.structure.layout.interleaved == (gate is alternating)
    experts.config._experts_implementation = implementation
    captured = run(experts, *inputs)
    assert captured.reasons == [None]
    assert len(captured.calls(EXPERTS)) == 1 and not captured.calls(MARKER)
    hidden_states, ids, weights = inputs
    operator = torch.ops.int8moe.experts(
        hidden_states, topk_weights=weights, topk_ids=ids, **experts_arguments(experts)
    )
    assert torch.equal(captured.result, operator)
    # int8 codes with 48 to 64 terms a product; another gate gives 0.1 at least.
    assert hf_models.relative_error(operator, wanted) < 0.03


def narrowed(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.to(torch.float8_e4m3fn).to(h.dtype)) * up


def test_gate_that_narrows_is_left_alone() -> None:
    # Its casts are no widening: the operator would be another function.
    experts = experts_with(narrowed, torch.bfloat16)
    with pytest.warns(UserWarning, match="left as it was"):
        quantize_(experts)
    assert experts.gate_up_proj.dtype == torch.bfloat16
