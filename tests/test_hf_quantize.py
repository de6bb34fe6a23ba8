"""quantize_: what it changes, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import warnings
import weakref
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from torch import nn

from int8moe_compile import quantization
from int8moe_compile.hf import Int8MoeConfig, find_experts, reason_of, record_of
from int8moe_compile.quantization import quantize_
from int8moe_compile.schemes import (
    ACTIVATION_WORDS,
    INT8_DYNAMIC_TOKEN,
    INT8_STATIC_CHANNEL,
    INT8_STATIC_TENSOR,
    SCHEMES,
    QuantKey,
    Scheme,
    scheme_of,
)

SMALL_BLOCK = {"hidden": 64, "intermediate": 48, "experts": 8}


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in find_experts(model)]


def test_returns_the_model_and_converts_only_its_experts() -> None:
    model = hf_models.build_model("qwen2_moe")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert quantize_(model) is model
    after = model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    weights = {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in range(hf_models.LAYERS)
        for name in ("gate_up_proj", "down_proj")
    }
    assert changed == weights
    assert set(after) - set(before) == {f"{name}_scale" for name in weights}
    for name in weights:
        codes, scale = after[name], after[f"{name}_scale"]
        assert codes.dtype == torch.int8 and codes.shape == before[name].shape
        assert scale.dtype == torch.float32 and scale.shape == codes.shape[:2]
        assert codes.element_size() * codes.numel() * 2 == before[name].nbytes


def test_weights_are_plain_parameters_in_our_layout() -> None:
    model = hf_models.build_model("gpt_oss")
    experts = experts_of(model)[0]
    hidden, intermediate, count = SMALL_BLOCK.values()
    biases = experts.gate_up_proj_bias.clone()
    quantize_(model)
    assert type(experts).__name__ == "GptOssExperts"
    assert type(experts.gate_up_proj) is nn.Parameter
    assert not experts.gate_up_proj.requires_grad
    assert experts.gate_up_proj.shape == (count, 2 * intermediate, hidden)
    assert experts.gate_up_proj.is_contiguous()
    assert experts.down_proj.shape == (count, hidden, intermediate)
    assert experts.down_proj.is_contiguous()
    assert torch.equal(experts.gate_up_proj_bias[:, :intermediate], biases[:, ::2])
    assert torch.equal(experts.gate_up_proj_bias[:, intermediate:], biases[:, 1::2])


@pytest.mark.parametrize(
    ("scheme", "name", "w13_columns", "w2_columns"),
    [
        ("w8a8", "MixtralExperts", 96, 64),
        ("w8a8_tensor", "MixtralExperts", 2, 1),
        ("w8a8_tensor", "NemotronHExperts", 1, 1),
        ("int8_per_channel_weight_only", "MixtralExperts", 96, 64),
    ],
)
def test_shapes_of_the_scales(scheme: str, name: str, w13_columns: int, w2_columns: int) -> None:
    experts = hf_models.build_experts(hf_models.experts_class(name))
    quantize_(experts, scheme)
    record = record_of(experts)
    assert record is not None
    scales = [getattr(experts, f"{w}_scale") for w in (record.structure.w13_name, "down_proj")]
    assert [scale.shape[1] for scale in scales] == [w13_columns, w2_columns]


def test_zero_rows_get_scale_one() -> None:
    experts = hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
    with torch.no_grad():
        experts.gate_up_proj[3, 5] = 0
    quantize_(experts)
    assert float(experts.gate_up_proj_scale[3, 5]) == 1.0
    assert not bool(experts.gate_up_proj[3, 5].any())
    assert bool(torch.isfinite(experts(*hf_models.routed())).all())


def test_twice_is_once() -> None:
    model = quantize_(hf_models.build_model("mixtral"))
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    record = record_of(experts_of(model)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantize_(model) is model
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert record_of(experts_of(model)[0]) is record


def test_another_scheme_for_a_quantised_module() -> None:
    model = quantize_(hf_models.build_model("mixtral"), "experts_int8")
    quantize_(model, "w8a16")
    with pytest.raises(ValueError, match=r'model\.layers\.0\.mlp\.experts.*"w8a8".*"w8a16"'):
        quantize_(model, "w8a8")


def test_skip_by_pattern_and_completion_afterwards() -> None:
    model = hf_models.build_model("qwen3_moe", num_hidden_layers=3)
    before = model.model.layers[1].mlp.experts.gate_up_proj.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, skip=("model.layers.1.*",))
    experts = experts_of(model)
    assert [record_of(module) is not None for module in experts] == [True, False, True]
    assert "model.layers.1.*" in (reason_of(experts[1]) or "")
    assert torch.equal(experts[1].gate_up_proj, before)
    assert experts[1].gate_up_proj.dtype == torch.bfloat16
    model(hf_models.token_ids())

    first = experts[0].gate_up_proj.data_ptr()
    quantize_(model)
    assert all(record_of(module) is not None for module in experts)
    assert reason_of(experts[1]) is None
    assert experts[0].gate_up_proj.data_ptr() == first


@pytest.mark.parametrize("outer", ["model.layers.1", "model.layers.1.mlp", "*.1"])
def test_skipping_a_module_skips_the_experts_inside(outer: str) -> None:
    model = hf_models.build_model("qwen3_moe")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, skip=outer)
    first, second = experts_of(model)
    assert record_of(first) is not None and record_of(second) is None
    assert outer in (reason_of(second) or "")


def test_one_warning_names_the_patterns_that_match_nothing() -> None:
    model = hf_models.build_model("qwen3_moe")
    with pytest.warns(UserWarning, match="skip:") as caught:
        quantize_(model, skip=("layers.1", "model.layers.1", "lm_head", "*.layers.7.*"))
    (warning,) = caught
    assert str(warning.message).endswith("matches 'layers.1', 'lm_head', '*.layers.7.*'")
    assert warning.filename == __file__
    assert [record_of(module) is not None for module in experts_of(model)] == [True, False]


def test_skip_is_patterns_or_nothing() -> None:
    model = quantize_(hf_models.build_model("mixtral"), skip=None)
    assert all(record_of(module) is not None for module in experts_of(model))
    for skip, got in ((5, "int"), ([5], "one with 5"), (b"*", "one with 42")):
        with pytest.raises(TypeError, match=rf"skip: wanted a pattern \(str\).*got {got}"):
            quantize_(model, skip=skip)


def test_two_schemes_in_one_model_through_skip() -> None:
    model = hf_models.build_model("mixtral")
    quantize_(model, "w8a8", skip="*.layers.1.*")
    quantize_(model, "w8a16", skip="*.layers.0.*")
    records = [record_of(module) for module in experts_of(model)]
    assert [record.scheme.name for record in records if record] == ["w8a8", "w8a16"]


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts"])
@pytest.mark.parametrize("fails_at", ["first expert", "second weight"])
def test_an_interrupted_module_runs_and_is_completed(
    name: str, fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = hf_models.build_experts(hf_models.experts_class(name))
    experts = copy.deepcopy(original)
    calls = []

    def out_of_memory(weight: torch.Tensor, granularity: str) -> Any:
        calls.append(granularity)
        if len(calls) > (0 if fails_at == "first expert" else hf_models.EXPERTS):
            raise torch.OutOfMemoryError("no memory")
        return quantize_weight(weight, granularity)

    quantize_weight = quantization.quantize_weight
    monkeypatch.setattr(quantization, "quantize_weight", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        quantize_(experts)
    inputs = hf_models.routed()
    assert hf_models.relative_error(experts(*inputs), original(*inputs)) < 0.03

    monkeypatch.undo()
    quantize_(experts)
    whole = quantize_(copy.deepcopy(original))
    for key, value in whole.state_dict().items():
        assert torch.equal(experts.state_dict()[key], value), key
    assert torch.equal(experts(*inputs), whole(*inputs))


def test_no_float_copy_of_a_whole_weight() -> None:
    experts = hf_models.build_experts(
        hf_models.experts_class("MixtralExperts"), num_local_experts=64
    )
    one = experts.gate_up_proj[0].numel()
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            for t in result if isinstance(result, tuple) else (result,):
                fresh = isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known
                if fresh and t.dtype.is_floating_point:
                    largest.append(t.numel())
            return result

    with Sizes():
        quantize_(experts)
    assert largest and max(largest) <= one


def test_float_weights_are_released() -> None:
    experts = hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
    storages = [weakref.ref(experts.gate_up_proj), weakref.ref(experts.down_proj)]
    quantize_(experts)
    assert all(storage() is None for storage in storages)


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential()])
def test_model_without_experts(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"model: wanted .*experts.*got"):
        quantize_(model)


def test_no_module_at_all() -> None:
    with pytest.raises(TypeError, match=r"model: wanted a torch.nn.Module, got str"):
        quantize_("Qwen/Qwen3-30B-A3B")  # type: ignore[arg-type]


def test_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"scheme: wanted one of 'w8a8'.*got 'int4'"):
        quantize_(hf_models.build_model("mixtral"), "int4")


@pytest.mark.parametrize("activations", [*ACTIVATION_WORDS])
def test_a_scheme_object_is_quantised_saved_and_loaded(
    tmp_path: Path, activations: QuantKey | None
) -> None:
    scheme = Scheme("mine", INT8_STATIC_TENSOR, activations)
    calibration = [hf_models.token_ids()] if scheme.activation_quant == "static" else None
    model = quantize_(hf_models.build_model("qwen3_moe"), scheme, calibration=calibration)
    expected = scheme_of(INT8_STATIC_TENSOR, activations)
    for module in experts_of(model):
        record = record_of(module)
        assert record is not None and record.scheme == expected
        assert module.gate_up_proj_scale.shape == (8, 2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert [record_of(module).scheme for module in experts_of(again)] == [expected] * 2
    states = again.state_dict(), model.state_dict()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_a_scheme_object_has_to_agree_in_its_keys() -> None:
    channel, tensor = (
        Scheme("mine", key, INT8_DYNAMIC_TOKEN) for key in (INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR)
    )
    model = quantize_(hf_models.build_model("mixtral"), tensor)
    quantize_(model, tensor)
    quantize_(model, "w8a8")
    wanted = r'wanted as "w8a8", got one quantised as "w8a8" with weights per tensor'
    with pytest.raises(ValueError, match=wanted):
        quantize_(model, channel)
    assert record_of(experts_of(model)[0]).scheme.weight_key == INT8_STATIC_TENSOR


def test_a_scheme_without_a_word_is_refused_while_loading() -> None:
    assert Int8MoeConfig(SCHEMES["w8a16"]).scheme == "w8a16"
    assert Int8MoeConfig(Scheme("mine", INT8_STATIC_CHANNEL, None)).scheme == "w8a16"
    with pytest.raises(ValueError, match=r'scheme: .*"w8a16" with weights per tensor'):
        Int8MoeConfig(Scheme("w8a16", INT8_STATIC_TENSOR, None))


@pytest.mark.parametrize(
    "key", [QuantKey("group", group_size=128), QuantKey("channel", symmetric=False)]
)
def test_scheme_that_nothing_runs(key: QuantKey) -> None:
    model = hf_models.build_model("mixtral")
    with pytest.raises(ValueError, match="scheme: 'mine' cannot be run"):
        quantize_(model, Scheme("mine", key, INT8_DYNAMIC_TOKEN))
    assert all(record_of(module) is None for module in experts_of(model))


def test_meta_device_names_the_parameter_and_changes_nothing() -> None:
    model = hf_models.build_model("mixtral")
    experts = experts_of(model)
    experts[1].down_proj = nn.Parameter(experts[1].down_proj.to("meta"), requires_grad=False)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj.*meta"):
        quantize_(model)
    assert all(record_of(module) is None for module in experts)
    quantize_(model, skip="*.1.*")
    assert record_of(experts[0]) is not None


class Sharded(torch.Tensor):
    """Stand in for a DTensor, which a parallel plan puts in place of a weight."""


def damaged(kind: str) -> nn.Module:
    experts = hf_models.build_experts(hf_models.experts_class("GptOssExperts"))
    if kind == "nan":
        experts.gate_up_proj.data[2, 3, 4] = float("nan")
    elif kind == "float64":
        experts.double()
    elif kind == "narrow":
        experts.down_proj = nn.Parameter(experts.down_proj[:, :16])
    elif kind == "no bias":
        experts.gate_up_proj_bias = None
    elif kind == "subclass":
        weight = experts.down_proj.detach().as_subclass(Sharded)
        experts._parameters["down_proj"] = nn.Parameter(weight, requires_grad=False)
    elif kind == "forward":
        experts.forward = lambda *args: args[0]
    return experts


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nan", "gate_up_proj has values that are not finite"),
        ("float64", "gate_up_proj has dtype torch.float64"),
        ("narrow", "gate_up_proj: wanted shape"),
        ("no bias", "gate_up_proj_bias: wanted"),
        ("subclass", "down_proj is a Sharded; plain tensors only"),
        ("forward", "its forward was replaced"),
    ],
)
def test_module_that_cannot_be_quantised(kind: str, reason: str) -> None:
    experts = damaged(kind)
    weight = experts.gate_up_proj
    with pytest.warns(UserWarning, match=f"the model itself.*{reason}"):
        quantize_(experts)
    assert reason in (reason_of(experts) or "")
    assert experts.gate_up_proj is weight


def test_the_oracles_refusal_leaves_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(problem: Any, *keys: Any, device: torch.device) -> None:
        asked.append((problem, device))
        raise NotImplementedError("no INT8 MoE backend accepts it")

    monkeypatch.setattr(quantization, "select_int8_moe_backend", refuse)
    model = hf_models.build_model("gpt_oss")
    with pytest.warns(UserWarning, match="no INT8 MoE backend accepts it") as caught:
        quantize_(model)
    assert len(caught) == 1
    problem, device = asked[0]
    assert (problem.num_experts, problem.top_k) == (hf_models.EXPERTS, hf_models.TOP_K)
    assert (problem.hidden_size, problem.intermediate_size) == (64, 48)
    assert (problem.activation, problem.gated, problem.has_bias) == ("silu", True, True)
    assert (problem.dtype, device.type) == (torch.bfloat16, "cpu")
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("chosen", ["eager", "batched_mm"])
def test_a_chosen_implementation_stays(chosen: str) -> None:
    model = quantize_(hf_models.build_model("mixtral", implementation=chosen))
    assert model.config._experts_implementation == chosen


def test_the_default_implementation_is_replaced_where_something_was_quantised() -> None:
    model = hf_models.build_model("mixtral")
    quantize_(model, skip="*")
    assert model.config._experts_implementation == "grouped_mm"
    quantize_(model)
    assert model.config._experts_implementation == "int8moe"
