"""The experts implementation "int8moe": when it is the operator, when transformers' own code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import hf_models
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import int8moe_compile.hf
from int8moe_compile import registry
from int8moe_compile.hf import IMPLEMENTATION, experts_arguments, find_experts, register
from int8moe_compile.hf import experts as hf_experts
from int8moe_compile.quantization import quantize_


class Calls(TorchDispatchMode):
    """Count the package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "int8moe":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def experts_module(name: str = "MixtralExperts", **options: Any) -> torch.nn.Module:
    return hf_models.build_experts(hf_models.experts_class(name), **options)


def names_called(module: torch.nn.Module, *inputs: torch.Tensor) -> list[str]:
    with Calls() as calls:
        module(*inputs)
    return calls.names


def test_registration() -> None:
    register()
    assert IMPLEMENTATION == "int8moe"
    assert "int8moe" in ALL_EXPERTS_FUNCTIONS
    model = hf_models.build_model("mixtral", implementation="int8moe")
    assert model.config._experts_implementation == "int8moe"


def test_the_package_alone_imports_no_transformers() -> None:
    code = (
        "import sys, int8moe_compile, int8moe_compile.quantization\n"
        "assert not {'transformers', 'triton'} & set(sys.modules)\n"
        "import int8moe_compile.hf\n"
        "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS\n"
        "assert 'int8moe' in ALL_EXPERTS_FUNCTIONS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_operator_once_and_nothing_dequantised() -> None:
    experts = quantize_(experts_module())
    assert names_called(experts, *hf_models.routed()) == ["experts"]


@pytest.mark.parametrize("wants", ["hidden_states", "weights"])
def test_a_gradient_runs_transformers_code(wants: str) -> None:
    experts = quantize_(experts_module())
    hidden_states, ids, weights = hf_models.routed()
    (hidden_states if wants == "hidden_states" else weights).requires_grad_()
    assert names_called(experts, hidden_states, ids, weights) == ["dequantize"] * 2
    with torch.no_grad():
        assert names_called(experts, hidden_states, ids, weights) == ["experts"]


def test_unquantised_module_runs_grouped_code() -> None:
    experts = experts_module(implementation="int8moe")
    inputs = hf_models.routed()
    result = experts(*inputs)
    experts.config._experts_implementation = "grouped_mm"
    assert torch.equal(experts(*inputs), result)


def test_device_without_a_kernel_runs_transformers_code(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = quantize_(experts_module())
    monkeypatch.delitem(registry.KERNELS, "cpu")
    assert names_called(experts, *hf_models.routed()) == ["dequantize"] * 2


@pytest.fixture
def devices_asked() -> Iterator[None]:
    """Forget before and after a test what the oracle said of the devices."""
    hf_experts._runs_on.cache_clear()
    yield
    hf_experts._runs_on.cache_clear()


def test_a_refused_device_runs_transformers_code(
    monkeypatch: pytest.MonkeyPatch, devices_asked: None
) -> None:
    asked: list[torch.device] = []

    def refuse(problem: Any, *keys: Any, device: torch.device) -> None:
        asked.append(device)
        raise NotImplementedError("no INT8 MoE backend")

    experts = quantize_(experts_module())
    monkeypatch.setattr(hf_experts, "select_int8_moe_backend", refuse)
    for _ in range(2):
        assert names_called(experts, *hf_models.routed()) == ["dequantize"] * 2
    assert asked == [torch.device("cpu")]


def test_a_named_backend_is_honoured_in_eager_calls_too() -> None:
    experts, inputs = quantize_(experts_module()), hf_models.routed()
    plain = experts_module()
    with int8moe_compile.enabled("triton"):
        with pytest.raises(ValueError, match=r"backend: 'triton' cannot run.*got 'cpu'.*'auto'"):
            experts(*inputs)
        plain(*inputs)  # not quantised, so nobody's
        with int8moe_compile.enabled("cpu"):
            assert names_called(experts, *inputs) == ["experts"]
        inputs[0].requires_grad_()
        assert names_called(experts, *inputs) == ["dequantize"] * 2
    inputs[0].requires_grad_(False)
    assert names_called(experts, *inputs) == ["experts"]


@pytest.mark.parametrize("wide", ["hidden_states", "weights", "both"])
def test_float64_runs_transformers_code(wide: str) -> None:
    experts = quantize_(experts_module(dtype=torch.float32))
    hidden_states, ids, weights = hf_models.routed(dtype=torch.float32)
    expected = experts(hidden_states, ids, weights)
    if wide != "weights":
        hidden_states = hidden_states.double()
    if wide != "hidden_states":
        weights = weights.double()
    result = experts(hidden_states, ids, weights)
    assert names_called(experts, hidden_states, ids, weights) == ["dequantize"] * 2
    assert result.dtype == hidden_states.dtype and result.shape == expected.shape


def test_a_model_made_double_runs() -> None:
    model = quantize_(hf_models.build_model("mixtral")).double()
    with torch.no_grad():
        logits = model(hf_models.token_ids()).logits
    assert logits.dtype == torch.float64 and bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("implementation", ["int8moe", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_sentinel_ids_give_zero_rows(name: str, implementation: str) -> None:
    experts = quantize_(experts_module(name))
    experts.config._experts_implementation = implementation
    hidden_states, ids, weights = hf_models.routed()
    whole = experts(hidden_states, ids, weights)
    ids[1] = hf_models.EXPERTS
    weights[1] = 0
    before = ids.clone()
    result = experts(hidden_states, ids, weights)
    assert not bool(result[1].any())
    rest = [0, 2, 3, 4, 5, 6]
    assert torch.equal(result[rest], whole[rest])
    assert torch.equal(ids, before)


def test_no_tokens() -> None:
    experts = quantize_(experts_module("GptOssExperts"))
    result = experts(*(value[:0] for value in hf_models.routed()))
    assert result.shape == (0, hf_models.HIDDEN)


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_tensor", "w8a8_static", "w8a16"])
@pytest.mark.parametrize("name", ["GptOssExperts", "NemotronHExperts", "DeepseekV4Experts"])
def test_arguments_of_every_scheme(name: str, scheme: str) -> None:
    experts = experts_module(name)
    calibration = [hf_models.routed()] if scheme == "w8a8_static" else None
    quantize_(experts, scheme, calibration=calibration)
    arguments = experts_arguments(experts)
    word = {"w8a8": "token", "w8a8_tensor": "tensor", "w8a8_static": "static", "w8a16": "none"}
    assert arguments["activation_quant"] == word[scheme]
    assert ("a13_scale" in arguments) == ("a2_scale" in arguments) == (scheme == "w8a8_static")
    assert ("w13_bias" in arguments) == (name == "GptOssExperts")
    assert arguments["gated"] == (name != "NemotronHExperts")
    gate = {key: arguments[key] for key in ("activation", "alpha", "beta", "limit")}
    assert (
        tuple(gate.values())
        == {
            "GptOssExperts": ("silu", 1.702, 1.0, 7.0),
            "NemotronHExperts": ("relu2", 1.0, 0.0, None),
            "DeepseekV4Experts": ("silu", 1.0, 0.0, 10.0),
        }[name]
    )


def test_generate_in_eager_mode_calls_the_operator_each_step() -> None:
    model = quantize_(hf_models.build_model("qwen3_moe"))
    ids = hf_models.token_ids(batch=1, length=5)
    with torch.inference_mode(), Calls() as calls:
        out = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape == (1, 9)
    assert calls.names == ["experts"] * (4 * hf_models.LAYERS)
    assert model.config._experts_implementation == "int8moe"


def test_vision_part_without_experts_is_untouched() -> None:
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            **hf_models.COMMON,
            **hf_models.FAMILIES["qwen3_moe"].options,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": hf_models.HIDDEN,
            "deepstack_visual_indexes": [0],
        },
    )
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16).eval()
    vision = {name: value.clone() for name, value in model.model.visual.state_dict().items()}
    quantize_(model)
    assert len(list(find_experts(model))) == hf_models.LAYERS
    assert model.config.text_config._experts_implementation == "int8moe"
    assert model.config.vision_config._experts_implementation != "int8moe"
    for name, value in model.model.visual.state_dict().items():
        assert torch.equal(value, vision[name])
    with torch.inference_mode(), Calls() as calls:
        model(hf_models.token_ids())
    assert calls.names == ["experts"] * hf_models.LAYERS


def test_hf_exports_what_it_says() -> None:
    assert all(hasattr(int8moe_compile.hf, name) for name in int8moe_compile.hf.__all__)
