"""What lies beside the experts in an INT8 checkpoint, and checkpoints that are not ours at all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_checkpoints import CHANNEL, TOKEN, Written, build, check, compressed, load, scaled, write
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from int8moe_compile.convert import convert_checkpoint
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, record_of
from int8moe_compile.hf.checkpoint_entries import claims

ATTENTION = "model.layers.0.self_attn.q_proj"


def with_int8_attention(directory: Path) -> tuple[Written, dict[str, torch.Tensor]]:
    """Write a checkpoint in which attention is int8, too; return what its weights come to."""
    written = write(directory, config=compressed(ignore=("lm_head", "re:.*gate$")))
    products = {}
    for name in [name for name in written.tensors if "self_attn" in name and "proj" in name]:
        codes, scale = scaled(written.tensors[name])
        written.tensors[name] = codes
        written.tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
        exact = codes.float() * scale.to(torch.bfloat16).float()
        products[name] = exact.to(torch.bfloat16)
    return written, products


def test_other_layers_are_dequantised_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    written, products = with_int8_attention(tmp_path)
    assert len(products) == 8
    with caplog.at_level(logging.WARNING, logger="int8moe_compile"):
        loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    for name, value in products.items():
        assert torch.equal(loaded.get_parameter(name), value), name
    lines = [record.getMessage() for record in caplog.records if "dequantised" in record.message]
    assert len(lines) == 1 and "8 modules" in lines[0] and "torch.bfloat16" in lines[0]


@pytest.mark.parametrize("fault", ["no scale", "no weight", "another shape"])
def test_other_layers_are_checked_as_strictly(tmp_path: Path, fault: str):
    written, _ = with_int8_attention(tmp_path)
    if fault == "no scale":
        del written.tensors[f"{ATTENTION}.weight_scale"]
    elif fault == "no weight":
        del written.tensors[f"{ATTENTION}.weight"]
    else:
        written.tensors[f"{ATTENTION}.weight_scale"] = torch.ones(7, 1)
    with pytest.raises(CheckpointError, match=ATTENTION.replace(".", r"\.")):
        load(written.save(tmp_path / "int8"), written)


def test_key_value_scales_are_left_to_their_owner(tmp_path: Path):
    config = {**compressed(), "kv_cache_scheme": {**CHANNEL, "strategy": "tensor"}}
    written = write(tmp_path, config=config)
    written.tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    written.tensors["model.layers.0.self_attn.v_scale"] = torch.ones(1)
    check(load(written.save(tmp_path / "int8"), written), written)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("fields", "ours"),
    [
        (compressed(CHANNEL, TOKEN), True),
        (compressed({**CHANNEL, "symmetric": False}, TOKEN), True),
        (compressed(FLOAT8, {**FLOAT8, "strategy": "token", "dynamic": True}), False),
        (compressed(FOUR, None, format="pack-quantized"), False),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, False),
        ({"quant_method": "compressed-tensors"}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, False),
        ({"quant_method": "awq"}, False),
    ],
)
def test_only_int8_is_claimed(fields: dict[str, Any], ours: bool):
    assert claims(fields) == ours


class Former(HfQuantizer):
    """Stand in for the quantizer that transformers has for a format."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def __init__(self, config: Any, **kwargs: Any) -> None:
        self.config = config
        self.calls: list[str] = ["created"]

    def validate_environment(self, **kwargs: Any) -> None:
        self.calls.append("validated")

    def update_tp_plan(self, config: Any) -> Any:
        return config

    def update_ep_plan(self, config: Any) -> Any:
        return config

    def preprocess_model(self, model: Any, **kwargs: Any) -> Any:
        self.calls.append("preprocessed")
        return model


class FormerConfig:
    """Stand in for the configuration that transformers has for a format."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.quant_method = "compressed-tensors"

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *args: Any, **kwargs: Any) -> FormerConfig:
        return cls(fields)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Wrap stand-ins for transformers' own entries, and put everything back afterwards."""
    from int8moe_compile.hf.checkpoint_entries import _wrap

    method = "compressed-tensors"
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, method, FormerConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, method, Former)
    _wrap(method)
    return AUTO_QUANTIZATION_CONFIG_MAPPING[method], AUTO_QUANTIZER_MAPPING[method]


def test_what_is_not_int8_never_meets_our_code(entries: tuple[Any, Any]):
    config = entries[0].from_dict(compressed(FLOAT8))
    assert type(config) is FormerConfig
    assert type(entries[1](config, pre_quantized=True)) is Former


@pytest.mark.parametrize("dense", [True, False])
def test_a_model_without_int8_experts_goes_to_transformers(entries: tuple[Any, Any], dense: bool):
    ignore = () if dense else ("re:.*experts.*",)
    fields = compressed(CHANNEL, TOKEN, ignore=ignore)
    quantizer = entries[1](entries[0].from_dict(fields), pre_quantized=True)
    assert type(quantizer) is not Former
    model = torch.nn.Linear(4, 4) if dense else build("qwen3_moe")
    model.config = transformers.PretrainedConfig() if dense else model.config
    quantizer.preprocess_model(model=model, dtype=torch.bfloat16, checkpoint_files=[])
    assert type(quantizer) is Former
    assert quantizer.config.fields == fields
    assert quantizer.calls == ["created", "validated", "preprocessed"]


def test_registering_twice_changes_nothing():
    import int8moe_compile.hf as hf

    before = dict(AUTO_QUANTIZER_MAPPING), dict(AUTO_QUANTIZATION_CONFIG_MAPPING)
    hf.register()
    assert before == (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_a_chosen_implementation_stays(tmp_path: Path, implementation: str):
    written = write(tmp_path)
    directory = written.save(tmp_path / "int8")
    loaded = load(directory, written, experts_implementation=implementation)
    kept = "int8moe" if implementation == "grouped_mm" else implementation
    assert loaded.config._experts_implementation == kept


def test_a_parallel_plan_is_refused(tmp_path: Path):
    from int8moe_compile.hf.quantizer import Int8MoeQuantizer

    config = transformers.PretrainedConfig()
    config.distributed_config = object()
    quantizer = Int8MoeQuantizer(None, pre_quantized=True)
    with pytest.raises(NotImplementedError, match="parallel plans"):
        quantizer.update_tp_plan(config)


def test_a_loaded_model_moves_and_casts_like_a_quantised_one(tmp_path: Path):
    written = write(tmp_path)
    loaded = load(written.save(tmp_path / "int8"), written).half()
    check(loaded, written)
    assert loaded.dtype == torch.float16
    for _, module in find_experts(loaded):
        assert record_of(module).dtype == torch.float16
    loaded.requires_grad_(True)


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h", "qwen3_moe"])
def test_everything_else_has_the_dtype_that_was_asked_for(tmp_path: Path, family: str):
    model = build(family)
    model.save_pretrained(tmp_path / "float")
    convert_checkpoint(tmp_path / "float", tmp_path / "int8", progress=False)
    kind = type(model)
    plain = kind.from_pretrained(tmp_path / "float", dtype=torch.float16)
    wanted = {name: value.dtype for name, value in plain.state_dict().items()}
    loaded = kind.from_pretrained(tmp_path / "int8", dtype=torch.float16).state_dict()
    for name, value in loaded.items():
        if value.dtype != torch.int8 and not name.endswith("proj_scale"):
            assert value.dtype == wanted[name], name
