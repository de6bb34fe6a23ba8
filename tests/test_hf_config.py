"""Int8MoeConfig: what its arguments mean, and the same fields in a config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_models import build_model

from int8moe_compile.checkpoint_config import read_config
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, record_of
from int8moe_compile.hf.config import Int8MoeConfig

FIRST, SECOND = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"
ARGUMENTS = ("skip", "modules_to_not_convert")


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_one_string_is_one_pattern(argument: str) -> None:
    word = "*layers.1*" if argument == "skip" else "layers.1"
    for value in (word, [word], (word,), {word}):
        config = Int8MoeConfig(**{argument: value})
        assert config.to_dict()[argument] == [word]
        assert config.skips(FIRST) is None and config.skips(SECOND) == word


def test_one_string_leaves_experts_out_of_a_load(tmp_path: Path) -> None:
    model = build_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    config = Int8MoeConfig(modules_to_not_convert="experts")
    loaded = type(model).from_pretrained(tmp_path, quantization_config=config)
    assert all(record_of(module) is None for _, module in find_experts(loaded))


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_none_is_no_pattern_and_anything_else_is_refused(argument: str) -> None:
    assert Int8MoeConfig(**{argument: None}).to_dict() == Int8MoeConfig().to_dict()
    for wrong in (5, [5], {"a": 1}, b"experts", True):
        with pytest.raises(TypeError, match=f"^{argument}: wanted a string or a list of strings"):
            Int8MoeConfig(**{argument: wrong})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"skip": 5}, "skip: wanted a list of strings, got 5"),
    ({"modules_to_not_convert": [5]}, r"modules_to_not_convert: wanted .*, got \[5\]"),
    ({"other": 1}, "other: wanted no field but quant_method, scheme"),
    ({"scheme": None}, "scheme: wanted one of 'w8a8'.*, got None"),
    ({"scheme": ["w8a8"]}, r"scheme: wanted one of 'w8a8'.*, got \['w8a8'\]"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_loader_and_reader_refuse_the_same_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^quantization_config: {message}"):
        Int8MoeConfig.from_dict(fields)
    with pytest.raises(CheckpointError, match=f"^quantization_config: {message}"):
        read_config({"quant_method": "int8moe", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"skip": None},
        {"skip": "*layers.1*"},
        {"skip": ["model.layers.1"]},
        {"skip": ["*s.1"]},
        {"modules_to_not_convert": "layers.1"},
        {"modules_to_not_convert": ["layers", "x"]},
        {"modules_to_not_convert": ["layer"]},
        {"skip": ["re:("]},
    ],
)
def test_loader_and_reader_leave_out_the_same_modules(fields: dict[str, Any]) -> None:
    config = Int8MoeConfig.from_dict(fields)
    read = read_config(config.to_dict())
    for name in (FIRST, SECOND):
        keys = read.keys_of([f"{name}.0.up_proj"])
        assert (keys is None) == (config.skips(name) is not None)
