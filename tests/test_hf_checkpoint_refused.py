"""Int8MoeConfig on models whose experts cannot run: left as quantize_ does, saved as float."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from hf_models import build_model
from test_families_undecorated import CASES
from torch import nn
from transformers import CompressedTensorsConfig

from int8moe_compile.hf import find_experts, reason_of, record_of
from int8moe_compile.hf.config import Int8MoeConfig
from int8moe_compile.hf.unsupported import find_unsupported
from int8moe_compile.quantization import quantize_


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


def config_of(directory: Path) -> object:
    return json.loads((directory / "config.json").read_text()).get("quantization_config")


@pytest.mark.parametrize("name", CASES)
def test_undecorated_experts_stay_with_their_reason(tmp_path: Path, name: str) -> None:
    model = CASES[name].build()
    model.save_pretrained(tmp_path / "float")
    kind = type(model)
    with pytest.warns(UserWarning, match=f"left as it was: .*{CASES[name].why}"):
        loaded = kind.from_pretrained(tmp_path / "float", quantization_config=Int8MoeConfig())
    with pytest.warns(UserWarning, match="left as it was"):
        quantize_(model)
    assert same(loaded, model)
    wanted = {path: reason_of(module) for path, module in find_unsupported(model)}
    assert wanted == {path: reason_of(module) for path, module in find_unsupported(loaded)}
    assert None not in wanted.values()


def test_those_that_are_skipped_by_name_are_no_reason_to_warn(tmp_path: Path) -> None:
    model = CASES["llama4"].build()
    model.save_pretrained(tmp_path)
    config = Int8MoeConfig(skip="*.experts")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = type(model).from_pretrained(tmp_path, quantization_config=config)
    assert all(reason_of(module) for _, module in find_unsupported(loaded))


def test_without_any_experts_it_is_an_error(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="without any"):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=Int8MoeConfig())


@pytest.mark.parametrize("how", ["skipped", "an activation", "dequantised"])
def test_what_has_no_int8_is_saved_as_float(tmp_path: Path, how: str) -> None:
    model = build_model("qwen3_moe", **({"hidden_act": "tanh"} if how == "an activation" else {}))
    config: object = Int8MoeConfig(skip="*" if how == "skipped" else ())
    if how == "dequantised":
        pytest.importorskip("compressed_tensors")
        quantize_(model)
        config = CompressedTensorsConfig(dequantize=True)
    model.save_pretrained(tmp_path / "first")
    kind = type(model)
    loaded = kind.from_pretrained(tmp_path / "first", quantization_config=config)
    assert all(record_of(module) is None for _, module in find_experts(loaded))
    loaded.save_pretrained(tmp_path / "second")
    assert config_of(tmp_path / "second") is None
    again = kind.from_pretrained(tmp_path / "second")
    assert same(again, loaded) and not hasattr(again, "hf_quantizer")
