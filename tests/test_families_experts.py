"""Every decorated experts class of transformers: compiled, it is one int8moe.experts and right."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, Captured, run
from torch import Tensor, nn

from int8moe_compile.hf import experts_arguments, reason_of, record_of
from int8moe_compile.quantization import quantize_

CLASSES = hf_models.supported_classes()
# Bound of the relative L2 error against the module with the same weights, rounded and dequantised:
# what is left is the rounding of the activations to int8, and of everything to bf16. Measured over
# all classes: at most 0.0149, 0.0236, 0.0225, 0.0065. A wrong activation or half gives over 0.1.
BOUNDS = {"w8a8": 0.02, "w8a8_tensor": 0.03, "w8a8_static": 0.03, "w8a16": 0.01}


@dataclass(frozen=True)
class Case:
    """How one module is compiled."""

    implementation: str
    dynamic: bool
    router_dtype: torch.dtype

    def __str__(self) -> str:
        shapes = "dynamic" if self.dynamic else "static"
        return f"{self.implementation}-{shapes}-{str(self.router_dtype).removeprefix('torch.')}"


CASES = [
    Case(*values)
    for values in itertools.product(
        ("grouped_mm", "batched_mm"), (False, True), (torch.bfloat16, torch.float32)
    )
]


def inputs(case: Case, tokens: int = 7, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    hidden_states, ids, weights = hf_models.routed(tokens, seed=seed)
    return hidden_states, ids, weights.to(case.router_dtype)


def dequantised(original: nn.Module, scheme: str) -> nn.Module:
    """Return the float module with the weights that int8 stands for."""
    return hf_models.rounded_to_int8(copy.deepcopy(original), per_tensor=scheme == "w8a8_tensor")


def assert_one_call(captured: Captured, layers: int = 1) -> None:
    assert captured.reasons == [None] * layers
    assert len(captured.graphs) == 1
    assert len(captured.calls(EXPERTS)) == layers
    assert not captured.calls(MARKER)


def check(kind: hf_models.ExpertsClass, case: Case, scheme: str = "w8a8") -> None:
    """Compile a class in one way; compare with the operator and the dequantised module."""
    original = hf_models.build_experts(kind, implementation=case.implementation)
    experts = copy.deepcopy(original)
    calibration = [inputs(case)] if scheme == "w8a8_static" else None
    quantize_(experts, scheme, calibration=calibration)
    assert record_of(experts) is not None, reason_of(experts)
    experts.config._experts_implementation = case.implementation
    given = inputs(case)
    captured = run(experts, *given, dynamic=case.dynamic)
    assert_one_call(captured)
    hidden_states, ids, weights = given
    operator = torch.ops.int8moe.experts(
        hidden_states, topk_weights=weights, topk_ids=ids, **experts_arguments(experts)
    )
    assert torch.equal(captured.result, operator)
    error = hf_models.relative_error(captured.result, dequantised(original, scheme)(*given))
    assert error < BOUNDS[scheme]


@pytest.mark.parametrize("number", range(len(CLASSES)), ids=lambda n: CLASSES[n].name)
def test_class_is_one_call(number: int) -> None:
    # Every class once; the four static ways to compile take turns, dynamic ones cost three times.
    static = [case for case in CASES if not case.dynamic]
    check(CLASSES[number], static[number % len(static)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_class_is_one_call_however_compiled(kind: hf_models.ExpertsClass, case: Case) -> None:
    check(kind, case)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8_tensor", "w8a8_static", "w8a16"])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_class_is_one_call_in_every_scheme(kind: hf_models.ExpertsClass, scheme: str) -> None:
    check(kind, CASES[0], scheme)
