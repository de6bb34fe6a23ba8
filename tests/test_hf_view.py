"""A quantised experts module as a module: copied, pickled, moved, saved, trained through."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import hf_models
import pytest
import torch
from torch import Tensor, nn

from int8moe_compile.hf import find_experts, record_of
from int8moe_compile.quantization import quantize_

FAMILIES = ["qwen3_moe", "gpt_oss", "nemotron_h"]


def codes_of(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.dtype == torch.int8]


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_is_whole_and_independent(family: str, how: str) -> None:
    model = quantize_(hf_models.build_model(family))
    ids = hf_models.token_ids()
    other = COPIES[how](model)
    with torch.inference_mode():
        wanted = model(ids).logits
        assert torch.equal(other(ids).logits, wanted)
        assert len(codes_of(other)) == 2 * hf_models.LAYERS
        for codes in codes_of(model):
            codes.zero_()
        assert torch.equal(other(ids).logits, wanted)
    for (_, mine), (_, its) in zip(find_experts(model), find_experts(other), strict=True):
        assert its.forward.args == (its,)
        assert mine.forward.args == (mine,)
        assert record_of(its) is not None
    other.requires_grad_(True)
    other.half()
    assert all(scale.dtype == torch.float32 for scale in scales_of(other))


def scales_of(model: nn.Module) -> list[Tensor]:
    return [value for name, value in model.named_buffers() if name.endswith("_scale")]


MOVES: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype]] = {
    "half": (lambda model: model.half(), torch.float16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "float": (lambda model: model.float(), torch.float32),
    "to": (lambda model: model.to(torch.float16), torch.float16),
    "to device and dtype": (lambda model: model.to("cpu", torch.float32), torch.float32),
    "type": (lambda model: model.type(torch.float16), torch.float16),
}


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts"])
def test_moves_keep_codes_and_scales(name: str, how: str) -> None:
    move, dtype = MOVES[how]
    experts = hf_models.build_experts(hf_models.experts_class(name))
    inputs = hf_models.routed(dtype=dtype)
    quantize_(experts, "w8a8_static", calibration=[hf_models.routed()])
    before = {key: value.clone() for key, value in experts.state_dict().items()}
    assert move(experts) is experts
    after = experts.state_dict()
    for key, value in before.items():
        if key.endswith("_bias"):
            assert after[key].dtype == dtype
        else:
            assert torch.equal(after[key], value) and after[key].dtype == value.dtype, key
    record = record_of(experts)
    assert record is not None and record.dtype == dtype
    for implementation in ("int8moe", "grouped_mm"):
        experts.config._experts_implementation = implementation
        assert experts(*inputs).dtype == dtype


def test_double_leaves_the_module_runnable() -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class("MixtralExperts")))
    experts.double()
    assert record_of(experts).dtype == torch.bfloat16
    assert all(scale.dtype == torch.float32 for scale in scales_of(experts))
    experts(*hf_models.routed())


def test_to_meta_and_back_by_to_empty() -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class("GptOssExperts")))
    state = experts.state_dict()
    inputs = hf_models.routed()
    wanted = experts(*inputs)
    empty = copy.deepcopy(experts).to("meta").to_empty(device="cpu")
    empty.load_state_dict(state)
    assert torch.equal(empty(*inputs), wanted)
    empty.requires_grad_(True)


def test_state_dict_round_trip_also_by_assignment() -> None:
    model = quantize_(hf_models.build_model("gpt_oss"))
    ids = hf_models.token_ids()
    other = quantize_(hf_models.build_model("gpt_oss", seed=5))
    assert other.state_dict().keys() == model.state_dict().keys()
    with torch.inference_mode():
        wanted = model(ids).logits
        assert not torch.equal(other(ids).logits, wanted)
    state = copy.deepcopy(model.state_dict())
    other.load_state_dict(state, assign=True)
    other.requires_grad_(True)
    with torch.inference_mode():
        assert torch.equal(other(ids).logits, wanted)


def test_float_state_dict_is_refused_and_codes_survive() -> None:
    model = hf_models.build_model("mixtral")
    floats = copy.deepcopy(model.state_dict())
    quantize_(model)
    before = [codes.clone() for codes in codes_of(model)]
    with pytest.raises(RuntimeError, match=r"experts\.gate_up_proj: wanted torch.int8, got"):
        model.load_state_dict(floats)
    assert all(torch.equal(a, b) for a, b in zip(codes_of(model), before, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_requires_grad_leaves_codes_and_scales_out(family: str) -> None:
    model = quantize_(hf_models.build_model(family))
    assert model.requires_grad_(True) is model
    for _ in range(2):
        for codes in codes_of(model):
            assert not codes.requires_grad
            assert codes.requires_grad_(True) is codes
        assert not any(scale.requires_grad for scale in scales_of(model))
        assert model.get_input_embeddings().weight.requires_grad
        model.half().requires_grad_(True)


@pytest.mark.parametrize("implementation", ["int8moe", "grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_gradient_is_that_of_the_dequantised_weights(name: str, implementation: str) -> None:
    original = hf_models.build_experts(hf_models.experts_class(name), dtype=torch.float32)
    experts = quantize_(copy.deepcopy(original))
    twin = hf_models.rounded_to_int8(copy.deepcopy(original))
    experts.config._experts_implementation = implementation
    twin.config._experts_implementation = "grouped_mm"
    hidden_states, ids, weights = hf_models.routed(dtype=torch.float32)
    gradients = []
    for module in (experts, twin):
        x, w = hidden_states.clone().requires_grad_(), weights.clone().requires_grad_()
        module(x, ids, w).square().sum().backward()
        gradients.append((x.grad, w.grad))
    for got, wanted in zip(*gradients, strict=True):
        assert hf_models.relative_error(got, wanted) < 1e-5


def test_model_backward_in_eval_mode_without_no_grad() -> None:
    model = quantize_(hf_models.build_model("qwen3_moe"))
    ids = hf_models.token_ids()
    model(ids, labels=ids).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    assert bool(torch.isfinite(gradient).all()) and bool(gradient.any())


@pytest.mark.parametrize("implementation", ["int8moe", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_autocast(family: str, dtype: torch.dtype, implementation: str) -> None:
    plain = hf_models.build_model(family)
    for _, experts in find_experts(plain):
        hf_models.rounded_to_int8(experts)
    model = quantize_(hf_models.build_model(family))
    inputs = hf_models.routed(dtype=dtype)
    outputs = []
    for one in (plain, model):
        one.set_experts_implementation("grouped_mm" if one is plain else implementation)
        (_, experts), *_ = find_experts(one)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs.append(experts(*inputs))
            one(hf_models.token_ids())
    wanted, got = outputs
    assert got.dtype == wanted.dtype
    assert hf_models.relative_error(got, wanted) < 2e-2


def test_accelerate_offload() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = quantize_(hf_models.build_model("gpt_oss"))
    ids = hf_models.token_ids()
    with torch.inference_mode():
        wanted = model(ids).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted)
    accelerate.hooks.remove_hook_from_submodules(model)


def test_hooks_of_accelerate_that_were_there_before_stay() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    seen = []

    class Counting(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(module)
            return args, kwargs

    experts = hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
    hooks.add_hook_to_module(experts, Counting())
    quantize_(experts, "w8a8_static", calibration=[hf_models.routed()])
    assert len(seen) == 1
    result = experts(*hf_models.routed())
    assert len(seen) == 2
    hooks.remove_hook_from_module(experts)
    assert torch.equal(experts(*hf_models.routed()), result)
    assert len(seen) == 2


@pytest.fixture
def swapping() -> Iterator[None]:
    """Let torch swap tensors where it would otherwise set their data."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_may_be_swapped_on_conversion(family: str) -> None:
    model, other = (quantize_(hf_models.build_model(family)) for _ in range(2))
    ids = hf_models.token_ids()
    with torch.no_grad():
        wanted = quantize_(hf_models.build_model(family))(ids).logits
        for codes in codes_of(other):
            codes.zero_()
        other.load_state_dict(model.state_dict())
        model.load_state_dict(model.state_dict(keep_vars=True))
        assert torch.equal(other(ids).logits, wanted) and torch.equal(model(ids).logits, wanted)
        assert other.half()(ids).logits.isfinite().all()
    assert {record_of(module).dtype for _, module in find_experts(other)} == {torch.float16}
    for converted in (model, other, copy.deepcopy(other)):
        converted.requires_grad_(True)
        assert len(codes_of(converted)) == 2 * hf_models.LAYERS
        assert all(codes.requires_grad_(True) is codes for codes in codes_of(converted))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversion_that_fails_leaves_codes_without_gradient(family: str) -> None:
    model = quantize_(hf_models.build_model(family))

    def fails(tensor: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    for _, module in find_experts(model):
        with pytest.raises(RuntimeError, match="out of memory"):
            module._apply(fails)
    model.requires_grad_(True)
