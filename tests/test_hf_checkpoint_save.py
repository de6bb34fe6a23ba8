"""Quantise while loading, save, reload: the bits of quantize_, whatever the family."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from hf_checkpoints import build
from hf_models import token_ids
from safetensors.torch import load_file, save_file
from torch import nn

from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import Int8MoeConfig, find_experts, reason_of, record_of
from int8moe_compile.quantization import quantize_

SCHEMES = ("w8a8", "w8a8_tensor", "w8a16")


def float_model(directory: Path, family: str) -> nn.Module:
    """Save a tiny model and return it as it loads."""
    model = build(family)
    model.save_pretrained(directory)
    return type(model).from_pretrained(directory)


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    """Compare every parameter and buffer, and what is known about each experts module."""
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        assert value.dtype == other.dtype and torch.equal(value, other), name
    for (_, one), (_, two) in zip(find_experts(left), find_experts(right), strict=True):
        first, second = record_of(one), record_of(two)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert (first.scheme, first.structure) == (second.scheme, second.structure)
            assert first.dtype == second.dtype
    assert left.config._experts_implementation == right.config._experts_implementation


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h"])
def test_loading_quantises_like_quantize(tmp_path: Path, family: str, scheme: str):
    model = float_model(tmp_path / "float", family)
    wanted = quantize_(copy.deepcopy(model), scheme)
    config = Int8MoeConfig(scheme)
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    assert_equal(loaded, wanted)
    for one, name in ((loaded, "loaded"), (wanted, "quantised")):
        one.save_pretrained(tmp_path / name)
        assert_equal(type(model).from_pretrained(tmp_path / name), wanted)
    with torch.inference_mode():
        assert torch.equal(loaded(token_ids()).logits, wanted(token_ids()).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_static_scales_are_saved(tmp_path: Path, family: str):
    model = float_model(tmp_path / "float", family)
    quantize_(model, "w8a8_static", calibration=[token_ids()])
    model.save_pretrained(tmp_path / "int8")
    assert_equal(type(model).from_pretrained(tmp_path / "int8"), model)


def test_fused_families_are_saved_in_their_own_layout(tmp_path: Path):
    model = float_model(tmp_path / "float", "gpt_oss")
    quantize_(model).save_pretrained(tmp_path / "int8")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("float", "int8"))
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        assert after[key].dtype == torch.int8 and after[key].shape == before[key].shape
        values = after[key].float() * after[f"{key}_scale"]
        error = (values - before[key].float()).abs()
        # Half a step, and what bf16 weights may be off their own rounding by.
        assert (error <= 0.51 * after[f"{key}_scale"]).all()
        assert torch.equal(after[f"{key}_bias"], before[f"{key}_bias"])


@pytest.mark.parametrize(
    "config",
    [
        Int8MoeConfig(skip="*layers.1*"),
        Int8MoeConfig(modules_to_not_convert=["layers.1"]),
        Int8MoeConfig("experts_int8", skip=["nothing", "model.layers.1.mlp.experts"]),
    ],
)
def test_skipped_modules_stay_float_and_reload_so(tmp_path: Path, config: Int8MoeConfig):
    model = float_model(tmp_path / "float", "qwen3_moe")
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    loaded.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    assert_equal(again, loaded)
    first, second = (module for _, module in find_experts(loaded))
    assert record_of(first) is not None and record_of(second) is None
    assert "skipped" in reason_of(second)
    plain = dict(find_experts(model))["model.layers.1.mlp.experts"]
    assert torch.equal(second.gate_up_proj, plain.gate_up_proj)


@pytest.mark.parametrize(
    "config",
    [
        Int8MoeConfig(skip=("model.layers.1", "*.9.*"), modules_to_not_convert=["lm_head"]),
        Int8MoeConfig(skip="*.9.*", modules_to_not_convert=["model.layers.1", "lm_head"]),
    ],
)
def test_outer_modules_are_skipped_and_one_warning_names_the_rest(
    tmp_path: Path, config: Int8MoeConfig
):
    model = float_model(tmp_path, "qwen3_moe")
    with pytest.warns(UserWarning, match="skip, modules_to_not_convert:") as caught:
        loaded = type(model).from_pretrained(tmp_path, quantization_config=config)
    (message,) = (str(w.message) for w in caught if "matches" in str(w.message))
    assert message.endswith("matches '*.9.*', 'lm_head'")
    first, second = (module for _, module in find_experts(loaded))
    assert record_of(first) is not None and record_of(second) is None


def test_everything_else_is_bitwise_as_before(tmp_path: Path):
    model = float_model(tmp_path / "float", "qwen3_moe")
    config = Int8MoeConfig()
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    routed = ("experts.gate_up_proj", "experts.down_proj")
    for name, value in model.state_dict().items():
        if not name.endswith(routed):
            assert torch.equal(loaded.state_dict()[name], value), name


def test_configurations_that_cannot_be_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="scheme"):
        Int8MoeConfig("w4a16")
    model = float_model(tmp_path / "float", "qwen3_moe")
    with pytest.raises(ValueError, match="calibration"):
        config = Int8MoeConfig("w8a8_static")
        type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    assert json.loads(Int8MoeConfig("w8a16").to_json_string())["scheme"] == "w8a16"


@pytest.mark.parametrize("fault", ["missing", "misshapen", "integer", "not finite"])
def test_float_experts_are_checked_while_loading(tmp_path: Path, fault: str):
    model = float_model(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "misshapen":
        tensors[name] = tensors[name][:, 1:].clone()
    elif fault == "integer":
        tensors[name] = tensors[name].to(torch.int8)
    else:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts"):
        type(model).from_pretrained(tmp_path, quantization_config=Int8MoeConfig())
