"""torchao's Int8Tensor experts: what torchao saves loads as int8; what does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import Written, check, load
from hf_formats import torchao, written_as_torchao
from hf_models import token_ids
from transformers import TorchAoConfig

from int8moe_compile.checkpoint_explain import explain_directory
from int8moe_compile.checkpoint_torchao import config_keys, tensor_keys
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, reason_of, record_of
from int8moe_compile.hf.checkpoint_entries import claims
from int8moe_compile.hf.experts import experts_arguments
from int8moe_compile.schemes import INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR

WORDS = {"w8a8": "token", "w8a8_tensor": "tensor", "w8a16": "none"}
EXPERTS = "model.layers.1.mlp.experts"
GATE_UP = f"{EXPERTS}._gate_up_proj"


@pytest.mark.parametrize("scheme", WORDS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_load_as_int8(tmp_path: Path, family: str, scheme: str):
    written = written_as_torchao(tmp_path, family, scheme)
    directory = written.save(tmp_path / "int8")
    loaded = load(directory, written)
    check(loaded, written)
    for _, module in find_experts(loaded):
        found, per_tensor = record_of(module).scheme, scheme == "w8a8_tensor"
        assert found.name == scheme
        assert found.weight_key == (INT8_STATIC_TENSOR if per_tensor else INT8_STATIC_CHANNEL)
        assert experts_arguments(module)["activation_quant"] == WORDS[scheme]
    with torch.inference_mode():
        assert torch.isfinite(loaded(token_ids()).logits).all()
    layers = explain_directory(directory, device="cpu")
    assert [(layer.scheme, layer.accepted) for layer in layers] == [(scheme, True)] * 2


def test_static_activations_keep_their_scale(tmp_path: Path):
    written = written_as_torchao(tmp_path, "qwen3_moe", "w8a8_tensor")
    config = json.loads(
        json.dumps(written.config).replace("Int8DynamicActivation", "Int8StaticActivation")
    )
    for name, text in written.metadata.items():
        fields = json.loads(text)
        fields["_tensor_data_names"].append("act_quant_scale")
        written.metadata[name] = json.dumps(fields)
        stem = name.replace("experts.", "experts._")
        value = 0.04 if "gate_up" in name else 0.5
        written.tensors[f"{stem}_act_quant_scale"] = torch.full((1, 1), value)
    loaded = load(replace(written, config=config).save(tmp_path / "int8"), written)
    check(loaded, written)
    for _, module in find_experts(loaded):
        arguments = experts_arguments(module)
        assert arguments["activation_quant"] == "static"
        assert (arguments["a13_scale"].item(), arguments["a2_scale"].item()) == (
            pytest.approx(0.04),
            0.5,
        )


@pytest.mark.parametrize(
    ("entries", "ours"),
    [
        ({"re:.*experts.gate_up_proj": "Int8WeightOnlyConfig"}, True),
        ({"model.layers.0.mlp.experts": "Int8DynamicActivationInt8WeightConfig"}, True),
        ({"_default": "Int8WeightOnlyConfig"}, False),
        ({"re:.*experts.gate_up_proj": "Float8WeightOnlyConfig"}, False),
        (None, False),
    ],
)
def test_only_named_int8_is_claimed(entries: dict[str, str] | None, ours: bool):
    rows = {"_type": "PerRow", "_data": {"dim": -1}}
    kinds = {
        name: {"_type": kind, "_data": {"granularity": rows}, "_version": 2}
        for name, kind in (entries or {"": "Int8WeightOnlyConfig"}).items()
    }
    whole = {"_type": "FqnToConfig", "_data": {"fqn_to_config": kinds}}
    quant_type = {"default": kinds[""] if entries is None else whole}
    assert claims({"quant_method": "torchao", "quant_type": quant_type}) == ours


@pytest.mark.parametrize("granularity", [[], [1, 2, 3], 7, "PerRow"])
def test_malformed_words_are_refused_with_a_reason(granularity: Any):
    fields = {"_type": "Int8WeightOnlyConfig", "_data": {"granularity": granularity}}
    assert "granularity" in str(config_keys(fields).reason)
    inner = {"_data": {"granularity": granularity}}
    data = {"block_size": [1, 1, 64], "act_quant_kwargs": inner}
    text = json.dumps({"_type": "Int8Tensor", "_data": data, "_tensor_data_names": 7})
    assert tensor_keys(text, (8, 96, 64)).reason is not None


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write one checkpoint; every fault is put into a copy of it."""
    return written_as_torchao(tmp_path_factory.mktemp("good"), "qwen3_moe", "w8a8")


WHERE = r"\(layer 1, all experts, gate_up\)"
FAULTS: dict[str, tuple[str, Any, str]] = {
    "no codes": ("qdata", None, rf"{WHERE}: wanted {GATE_UP}_qdata beside it"),
    "no scale": ("scale", None, r"all experts, gate_up\): wanted its scale, got none"),
    "scales along inputs": ("scale", torch.ones(8, 1, 64), rf"{WHERE}: wanted shape \[8, 96\] or"),
    "one scale": ("scale", torch.ones(1, 1, 1), rf"{WHERE}: wanted shape.*got \[1, 1, 1\]"),
    "a negative scale": ("scale", lambda t: -t, rf"{WHERE}: wanted positive finite scales"),
    "a zero point": ("zero_point", lambda t: t + 1, rf"{WHERE}: .*asymmetric"),
    "scaled inputs": ("act_pre_scale", torch.ones(64), rf"{WHERE}.*no ending 'act_pre_scale'"),
    "another dtype": ("qdata", lambda t: t.half(), rf"{WHERE}: wanted torch.int8, got torch.f"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_by_name(good: Written, tmp_path: Path, name: str):
    ending, change, message = FAULTS[name]
    tensors = dict(good.tensors)
    old = tensors.pop(f"{GATE_UP}_{ending}", None)
    if change is not None:
        tensors[f"{GATE_UP}_{ending}"] = change(old) if callable(change) else change
    with pytest.raises(CheckpointError, match=message):
        load(replace(good, tensors=tensors).save(tmp_path), good)


def changed(text: str, **fields: Any) -> str:
    """Return a description with other fields in its data."""
    whole = json.loads(text)
    whole["_data"] |= fields
    return json.dumps(whole)


DESCRIPTIONS: dict[str, tuple[Any, str]] = {
    "none": (lambda _: None, "wanted torchao's description of .*gate_up_proj"),
    "no JSON": (lambda _: "{", "quantization_config says"),
    "another kind": (
        lambda text: text.replace('"Int8Tensor"', '"IntxUnpackedToInt8Tensor"'),
        "quantization_config says",
    ),
    "weight-only": (lambda text: changed(text, act_quant_kwargs=None), "quantization_config says"),
    "groups": (lambda text: changed(text, block_size=[1, 1, 32]), "quantization_config says"),
    "no blocks": (lambda text: changed(text, block_size="all"), "quantization_config says"),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_headers_have_to_agree(good: Written, tmp_path: Path, name: str, named: bool):
    change, message = DESCRIPTIONS[name]
    key = f"{EXPERTS}.gate_up_proj"
    text = change(good.metadata[key])
    metadata = {other: said for other, said in good.metadata.items() if other != key}
    if text is not None:
        metadata[key] = text
    config = torchao("w8a8")
    if not named:
        entry = config["quant_type"]["default"]["_data"]["fqn_to_config"].popitem()[1]
        config["quant_type"]["default"]["_data"]["fqn_to_config"] = {"model.norm": entry}
        message = message if text is None else f"{EXPERTS}: "
    wrong = replace(good, metadata=metadata, config=config)
    with pytest.raises(CheckpointError, match=message):
        load(wrong.save(tmp_path), good)


KINDS = ("w8a8", "w8a8_tensor", "w8a16")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param(family, scheme, marks=() if scheme == "w8a8" else pytest.mark.slow)
        for family in FAMILIES
        for scheme in KINDS
    ],
)
def test_what_torchao_saves_loads(tmp_path: Path, family: str, scheme: str):
    quantization = pytest.importorskip("torchao.quantization")
    from hf_checkpoints import build

    kind = quantization.Int8DynamicActivationInt8WeightConfig
    wanted = {
        "w8a8": kind,
        "w8a8_tensor": lambda: kind(granularity=quantization.PerTensor()),
        "w8a16": quantization.Int8WeightOnlyConfig,
    }[scheme]()
    names = [r"re:.*\.experts\.gate_up_proj", r"re:.*\.experts\.down_proj", "re:.*q_proj"]
    config = TorchAoConfig(quant_type=quantization.FqnToConfig(dict.fromkeys(names, wanted)))
    model = build(family)
    model.save_pretrained(tmp_path / "float")
    theirs = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    theirs.save_pretrained(tmp_path / "int8")
    ours = type(model).from_pretrained(tmp_path / "int8")
    modules = dict(find_experts(ours))
    for path, other in find_experts(theirs):
        module = modules[path]
        assert reason_of(module) is None and record_of(module).scheme.name == scheme
        for name in ("gate_up_proj", "down_proj"):
            tensor, scale = getattr(other, name), getattr(module, f"{name}_scale")
            assert torch.equal(getattr(module, name), tensor.qdata)
            assert torch.equal(scale, tensor.scale.squeeze(-1).expand_as(scale))
    for name, tensor in theirs.named_parameters():
        if "q_proj" in name:
            assert torch.equal(ours.get_parameter(name), tensor.dequantize())
    layers = explain_directory(tmp_path / "int8", device="cpu")
    assert [(layer.scheme, layer.accepted) for layer in layers] == [(scheme, True)] * 2


def test_a_torchao_checkpoint_without_experts_stays_torchaos(tmp_path: Path):
    quantization = pytest.importorskip("torchao.quantization")
    from hf_checkpoints import build

    entries = {r"re:.*\.q_proj": quantization.Int8WeightOnlyConfig()}
    config = TorchAoConfig(quant_type=quantization.FqnToConfig(entries))
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "float")
    theirs = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    theirs.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    weight = again.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert type(weight).__name__ == "Int8Tensor"
    assert type(again.hf_quantizer).__name__ == "TorchAoHfQuantizer"
