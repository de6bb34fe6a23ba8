"""Configurations with entries of a wrong type: named by the loader and by explain alike."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_checkpoints import CHANNEL, TOKEN, Written, load, write
from hf_formats import gptq, quark, torchao, written_as_gptq, written_as_torchao

from int8moe_compile.checkpoint_config import read_config
from int8moe_compile.checkpoint_explain import explain_directory
from int8moe_compile.checkpoint_torchao import tensor_keys
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf.checkpoint_entries import claims

LIST, MAPPING = "a list of strings", "a mapping"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """Write one checkpoint of each format; every fault is put into a copy of one."""
    folder = tmp_path_factory.mktemp("good")
    return {
        "compressed": write(folder / "compressed"),
        "quark": write(folder / "quark", config=quark(CHANNEL, TOKEN)),
        "gptq": written_as_gptq(folder / "gptq", gptq()),
        "torchao": written_as_torchao(folder / "torchao", "qwen3_moe", "w8a8"),
    }


def named(value: Any) -> dict[str, Any]:
    """Return a configuration of torchao by names."""
    return {"default": {"_type": "FqnToConfig", "_data": value, "_version": 1}}


# format, entry, its value, what was wanted, of which inner entry
WRONG: list[tuple[str, str, Any, str, str]] = [
    ("compressed", "config_groups", [1], MAPPING, ""),
    ("compressed", "config_groups", {"g": 5}, MAPPING, ": g"),
    ("compressed", "config_groups", {"g": {"targets": 5}}, LIST, ": g: targets"),
    ("compressed", "ignore", 5, LIST, ""),
    ("compressed", "ignore", [5], LIST, ""),
    ("quark", "layer_quant_config", 5, MAPPING, ""),
    ("quark", "layer_quant_config", [1], MAPPING, ""),
    ("quark", "layer_type_quant_config", 5, MAPPING, ""),
    ("quark", "layer_type_quant_config", [1], MAPPING, ""),
    ("quark", "exclude", 5, LIST, ""),
    ("gptq", "dynamic", 5, MAPPING, ""),
    ("gptq", "dynamic", [1], MAPPING, ""),
    ("gptq", "dynamic", {"+:x": 5}, MAPPING, r": \+:x"),
    ("gptq", "modules_in_block_to_quantize", 5, "a list of lists", ""),
    ("gptq", "modules_in_block_to_quantize", [5], LIST, ""),
    ("gptq", "modules_in_block_to_quantize", {"a": 1}, "a list of lists", ""),
    ("gptq", "modules_to_not_convert", 5, LIST, ""),
    ("gptq", "group_size", [-1], "an integer", ""),
    ("gptq", "group_size", "-1", "an integer", ""),
    ("gptq", "bits", "8", "an integer", ""),
    ("gptq", "bits", True, "an integer", ""),
    ("gptq", "sym", "false", "true or false", ""),
    ("gptq", "sym", 0, "true or false", ""),
    ("gptq", "sym", None, "true or false", ""),
    ("gptq", "checkpoint_format", 5, "a word", ""),
    ("torchao", "quant_type", None, "an object with its _type", ""),
    ("torchao", "quant_type", 5, MAPPING, ""),
    ("torchao", "quant_type", [], MAPPING, ""),
    ("torchao", "quant_type", {}, "an object with its _type", ""),
    ("torchao", "quant_type", "int8_weight_only", MAPPING, ""),
    ("torchao", "quant_type", {"default": 5}, MAPPING, ": default"),
    ("torchao", "quant_type", {"default": {"_type": ["x"]}}, "an object with its _type", ""),
    ("torchao", "quant_type", named(5), MAPPING, ": _data"),
    ("torchao", "quant_type", named({"fqn_to_config": 5}), MAPPING, ": fqn_to_config"),
    ("torchao", "quant_type", named({"fqn_to_config": {"re:x": 5}}), MAPPING, ": re:x"),
]


@pytest.mark.parametrize(("format", "entry", "value", "wanted", "inner"), WRONG)
def test_entries_of_wrong_types_are_named(
    checkpoints: dict[str, Written],
    tmp_path: Path,
    format: str,
    entry: str,
    value: Any,
    wanted: str,
    inner: str,
) -> None:
    good = checkpoints[format]
    wrong = replace(good, config={**good.config, entry: value})
    message = f"^quantization_config: {entry}{inner}: wanted {wanted}.*got "
    directory = wrong.save(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        explain_directory(directory, device="cpu")
    with pytest.raises(CheckpointError, match=message):
        load(directory, wrong)


def changed(config: dict[str, Any], entry: str, field: str, value: Any) -> dict[str, Any]:
    """Return a configuration with another value inside one entry for weights or inputs."""
    whole = copy.deepcopy(config)
    outer = (
        whole["global_quant_config"] if "exclude" in whole else whole["config_groups"]["group_0"]
    )
    if field:
        outer[entry][field] = value
    else:
        outer[entry] = value
    return whole


# format, entry, its field, the value of the field, or of the entry where it is ""
INNER: list[tuple[str, str, str, Any]] = [
    ("compressed", "weights", "", 5),
    ("compressed", "weights", "strategy", ["channel"]),
    ("compressed", "weights", "group_size", [1]),
    ("compressed", "weights", "type", ["int"]),
    ("compressed", "weights", "num_bits", [8]),
    ("compressed", "weights", "symmetric", 1),
    ("compressed", "input_activations", "dynamic", "no"),
    ("quark", "weight", "", 5),
    ("quark", "weight", "", [{}, {}]),
    ("quark", "weight", "qscheme", 5),
    ("quark", "weight", "ch_axis", "0"),
    ("quark", "weight", "symmetric", 0),
    ("quark", "input_tensors", "is_dynamic", "no"),
]


@pytest.mark.parametrize(("format", "entry", "field", "value"), INNER)
def test_fields_of_wrong_types_are_named(
    checkpoints: dict[str, Written],
    tmp_path: Path,
    format: str,
    entry: str,
    field: str,
    value: Any,
) -> None:
    good = checkpoints[format]
    wrong = replace(good, config=changed(good.config, entry, field, value))
    directory = wrong.save(tmp_path)
    message = f"{entry}: {field}: wanted" if field else f"{entry}: wanted a mapping"
    for layer in explain_directory(directory, device="cpu"):
        assert not layer.accepted and message in str(layer.reason)
    with pytest.raises(CheckpointError, match=f"experts: quantization_config: {message}"):
        load(directory, wrong)


@pytest.mark.parametrize(
    ("format", "entry", "field", "value"),
    [
        ("compressed", "weights", "type", "float"),
        ("compressed", "weights", "strategy", "block"),
        ("compressed", "input_activations", "dynamic", "local"),
        ("quark", "weight", "dtype", "fp8_e4m3"),
        ("quark", "weight", "qscheme", "per_group"),
    ],
)
def test_words_of_other_schemes_are_transformers_business(
    checkpoints: dict[str, Written], format: str, entry: str, field: str, value: str
) -> None:
    assert not claims(changed(checkpoints[format].config, entry, field, value))


def test_malformed_entries_beside_float_experts_are_transformers_business(tmp_path: Path) -> None:
    written = write(tmp_path, config={**quark(CHANNEL, TOKEN), "exclude": 5}, skip=(0, 1))
    with pytest.raises(ImportError, match="Quark"):
        load(written.save(tmp_path / "float"), written)


@pytest.mark.parametrize("value", [5, [], [1], "int8"])
def test_a_configuration_has_to_be_a_mapping(
    checkpoints: dict[str, Written], tmp_path: Path, value: Any
) -> None:
    wrong = replace(checkpoints["compressed"], config=value)
    with pytest.raises(CheckpointError, match=r"^quantization_config: wanted a mapping, got"):
        explain_directory(wrong.save(tmp_path), device="cpu")


@pytest.mark.parametrize("word", ["nn", "ops", "tensor", "no such dtype", 5, ["bfloat16"]])
def test_the_dtype_has_to_be_one(
    checkpoints: dict[str, Written], tmp_path: Path, word: Any
) -> None:
    directory = checkpoints["compressed"].save(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": word}))
    with pytest.raises(CheckpointError, match=r"config\.json: dtype: wanted the name of a dtype"):
        explain_directory(directory, device="cpu")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("act_quant_kwargs", 5),
        ("act_quant_kwargs", []),
        ("block_size", 5),
        ("_tensor_data_names", 5),
        ("_tensor_data_names", "act_quant_scale"),
    ],
)
def test_malformed_descriptions_in_headers_are_named(
    checkpoints: dict[str, Written], tmp_path: Path, field: str, value: Any
) -> None:
    good, metadata = checkpoints["torchao"], {}
    for name, text in good.metadata.items():
        whole = json.loads(text)
        (whole if field.startswith("_") else whole["_data"])[field] = value
        metadata[name] = json.dumps(whole)
        assert f"{field}: wanted" in str(tensor_keys(metadata[name], (8, 96, 64)).reason)
    config = torchao("w8a8")
    wrong = replace(good, metadata=metadata, config=config)
    directory = wrong.save(tmp_path)
    for read in (lambda: explain_directory(directory, device="cpu"), lambda: load(directory, good)):
        with pytest.raises(CheckpointError, match=f"{field}: wanted"):
            read()


def test_blocks_may_be_listed_plainly() -> None:
    config = read_config(gptq(dynamic=None, modules_in_block_to_quantize=["mlp.experts", "k_proj"]))
    assert config.keys_of(["model.layers.0.self_attn.k_proj"]) is not None
    assert config.keys_of(["model.layers.0.self_attn.q_proj"]) is None


def test_sizes_of_groups_that_cannot_be_compared_are_no_crash() -> None:
    text = json.dumps({"_type": "Int8Tensor", "_data": {"block_size": [[1]]}})
    assert "group" in str(tensor_keys(text, (8, 96, 64)).reason)
    entry = {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": [1]}}
    config = read_config(
        {"quant_method": "torchao", "quant_type": named({"fqn_to_config": {"experts": entry}})}
    )
    keys = config.keys_of(["experts"])
    assert keys is not None and "group_size: wanted an integer" in str(keys.reason)
    assert keys in {keys}
