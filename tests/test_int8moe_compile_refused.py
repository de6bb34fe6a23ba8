"""Models that the package cannot run: refused from the files as quantize_ refuses them loaded."""

from __future__ import annotations

from pathlib import Path

import hf_models
import pytest
import test_families_undecorated
from transformers.activations import ACT2FN

from int8moe_compile.checkpoint_explain import explain_directory
from int8moe_compile.checkpoint_families import ACTIVATIONS, UNSUPPORTED, family_refusal
from int8moe_compile.convert import convert_checkpoint
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, record_of
from int8moe_compile.hf.gates import UnknownGateError, recognise_gate
from int8moe_compile.quantization import quantize_


@pytest.mark.parametrize("name", test_families_undecorated.CASES)
def test_experts_with_code_of_their_own_are_not_converted(tmp_path: Path, name: str) -> None:
    test_families_undecorated.CASES[name].build().save_pretrained(tmp_path / "float")
    with pytest.raises(CheckpointError, match=r"nothing to convert: experts of .*interface"):
        convert_checkpoint(tmp_path / "float", tmp_path / "int8", progress=False)
    assert not (tmp_path / "int8").exists()
    for layer in explain_directory(tmp_path / "float", device="cpu"):
        assert not layer.accepted and "use_experts_implementation" in str(layer.reason)


@pytest.mark.parametrize("act", ["tanh", "relu6"])
def test_activations_that_the_operator_lacks_are_not_converted(tmp_path: Path, act: str) -> None:
    model = hf_models.build_model("qwen3_moe", hidden_act=act)
    model.save_pretrained(tmp_path / "float")
    with pytest.raises(CheckpointError, match=f"nothing to convert: the activation .*'{act}'"):
        convert_checkpoint(tmp_path / "float", tmp_path / "int8", progress=False)
    assert not (tmp_path / "int8").exists()
    for layer in explain_directory(tmp_path / "float", device="cpu"):
        assert not layer.accepted and f"'{act}'" in str(layer.reason)
    with pytest.warns(UserWarning, match="left as it was"):
        quantize_(model)
    assert all(record_of(module) is None for _, module in find_experts(model))


@pytest.mark.parametrize("word", sorted(ACT2FN))
def test_names_of_activations_mean_what_the_modules_compute(word: str) -> None:
    try:
        kind = hf_models.experts_class("Qwen3MoeExperts")
        experts = hf_models.build_experts(kind, hidden_act=word)
        found = recognise_gate(experts).gate.activation
    except (UnknownGateError, ImportError, TypeError):
        found = None
    assert ACTIVATIONS.get(word) == found


@pytest.mark.parametrize("family", hf_models.FAMILIES)
def test_families_that_run_are_not_refused(family: str) -> None:
    config = hf_models.build_model(family).config.to_dict()
    assert family_refusal(config) is None
    assert family_refusal({"model_type": "outer", "text_config": config}) is None


def test_every_class_is_refused_where_quantize_refuses_it() -> None:
    for kind in hf_models.experts_classes():
        refusal = family_refusal(kind.config_cls().to_dict())
        assert (refusal is not None) == (kind.name in hf_models.REFUSALS), kind.name


def test_the_part_of_a_model_that_handles_text_decides() -> None:
    for family in UNSUPPORTED:
        for part in (f"{family}_text", family):
            text = family_refusal({"model_type": "x", "text_config": {"model_type": part}})
            assert text is not None and UNSUPPORTED[family] in text
    inner = {"hidden_act": "silu", "hidden_activation": "tanh"}
    assert family_refusal({"hidden_act": "silu", "text_config": inner}) is not None
    assert family_refusal({"hidden_act": "tanh", "text_config": {"hidden_act": "gelu"}}) is None
    assert family_refusal({"hidden_act": None}) is None
