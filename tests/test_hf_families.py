"""Every experts class of transformers: quantised, it computes what its rounded weights say."""

from __future__ import annotations

import copy

import hf_models
import pytest
import torch

import int8moe_compile
from int8moe_compile.hf import experts_arguments, find_experts, reason_of, record_of
from int8moe_compile.hf.view import ExpertsView
from int8moe_compile.quantization import quantize_

CLASSES = hf_models.supported_classes()
# int8 codes with 48 to 64 terms a product: 0.015 to 0.02 measured with a scale a row, to 0.035
# with one for many rows. Another activation, a swapped half or a lost clamp gives 0.1 at least.
ROUNDING = {"w8a8": 0.03, "w8a8_tensor": 0.05, "w8a8_static": 0.05, "w8a16": 0.02}


def test_discovery_of_the_decorator_finds_them_all() -> None:
    names = {kind.name for kind in CLASSES}
    assert len(names) >= 50
    assert {"MixtralExperts", "GptOssExperts", "NemotronHExperts"} <= names


def laid_out_alike(experts: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Compare the weights that both compute with, then give the twin's the same strides.

    Products of other strides sum in another order.
    """
    record = record_of(experts)
    assert record is not None
    view = ExpertsView(experts, record)
    for name, parameter in twin.named_parameters():
        mine = getattr(view, name)
        assert torch.equal(mine, parameter), name
        parameter.data = parameter.data.new_empty_strided(mine.shape, mine.stride()).copy_(
            parameter.data
        )


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_module_computes_with_its_rounded_weights(kind: hf_models.ExpertsClass) -> None:
    original = hf_models.build_experts(kind)
    experts = copy.deepcopy(original)
    inputs = hf_models.routed()
    assert quantize_(experts) is experts
    assert record_of(experts) is not None, reason_of(experts)
    assert type(experts) is type(original)

    twin = hf_models.rounded_to_int8(copy.deepcopy(original))
    laid_out_alike(experts, twin)
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        experts.config._experts_implementation = implementation
        twin.config._experts_implementation = implementation
        assert torch.equal(experts(*inputs), twin(*inputs)), implementation

    experts.config._experts_implementation = "int8moe"
    original.config._experts_implementation = "eager"
    result = experts(*inputs)
    assert hf_models.relative_error(result, original(*inputs)) < ROUNDING["w8a8"]
    hidden_states, ids, weights = inputs
    operator = torch.ops.int8moe.experts(
        hidden_states, topk_weights=weights, topk_ids=ids, **experts_arguments(experts)
    )
    assert torch.equal(result, operator)


REFUSED = [kind for kind in hf_models.experts_classes() if kind.name in hf_models.REFUSALS]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_module_that_the_operator_does_not_compute_is_refused(
    kind: hf_models.ExpertsClass,
) -> None:
    original = hf_models.build_experts(kind)
    experts = copy.deepcopy(original)
    with pytest.warns(UserWarning, match="left as it was"):
        quantize_(experts)
    assert hf_models.REFUSALS[kind.name] in str(reason_of(experts))
    for name, value in experts.state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), name
    (row,) = int8moe_compile.explain(experts)
    assert not row.accepted and hf_models.REFUSALS[kind.name] in row.reason
    inputs = hf_models.routed()
    assert torch.equal(experts(*inputs), original(*inputs))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_tensor", "w8a16"])
@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_scheme_and_dtype(name: str, scheme: str, dtype: torch.dtype) -> None:
    original = hf_models.build_experts(hf_models.experts_class(name), dtype=dtype)
    experts = quantize_(copy.deepcopy(original), scheme)
    inputs = hf_models.routed(dtype=dtype)
    twin = copy.deepcopy(original)
    hf_models.rounded_to_int8(twin, per_tensor=scheme == "w8a8_tensor")
    assert experts.config._experts_implementation == "int8moe"
    result = experts(*inputs)
    assert result.dtype == dtype
    assert hf_models.relative_error(result, original(*inputs)) < ROUNDING[scheme]
    if scheme == "w8a16":
        assert hf_models.relative_error(result, twin(*inputs)) < 4 * torch.finfo(dtype).eps

    record = record_of(experts)
    assert record is not None
    view = ExpertsView(experts, record)
    for parameter, value in twin.named_parameters():
        assert torch.equal(getattr(view, parameter), value), parameter


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_tensor", "w8a8_static", "w8a16"])
@pytest.mark.parametrize("family", hf_models.FAMILIES)
def test_every_model_and_scheme_in_eager_mode(family: str, scheme: str) -> None:
    model = hf_models.build_model(family)
    ids = hf_models.token_ids()
    calibration = [ids] if scheme == "w8a8_static" else None
    quantize_(model, scheme, calibration=calibration)
    calls = []

    def keep(
        module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        calls.append((module, inputs, output))

    for _, experts in find_experts(model):
        experts.register_forward_hook(keep)
    with torch.no_grad():
        logits = model(ids).logits
        assert bool(torch.isfinite(logits).all())
        assert len(calls) == hf_models.LAYERS
        for module, inputs, output in list(calls):
            # Routing may flip between two models, so that each block is judged on its own inputs.
            module.config._experts_implementation = "grouped_mm"
            wanted = module(*inputs)
            module.config._experts_implementation = "int8moe"
            assert hf_models.relative_error(output, wanted) < ROUNDING[scheme]
