"""Device maps while loading: what the CPU and the disk may hold of an INT8 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import build_model, token_ids
from torch import nn

from int8moe_compile.hf import find_experts, record_of
from int8moe_compile.hf.config import Int8MoeConfig
from int8moe_compile.quantization import quantize_

MODULES = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
LAYER = "model.layers.1"
INNER = ("self_attn", "mlp.gate", "mlp.experts", "input_layernorm", "post_attention_layernorm")
ON_CPU = dict.fromkeys((*MODULES, *(f"{LAYER}.{name}" for name in INNER)), "cpu")


@pytest.fixture(scope="module", params=["int8", "float"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one that is quantised, and one that will be while it is loaded."""
    directory = tmp_path_factory.mktemp(request.param)
    model = build_model("qwen3_moe")
    (quantize_(model) if request.param == "int8" else model).save_pretrained(directory)
    return directory


def load(directory: Path, offload: Path, skip: str = "", **options: Any) -> nn.Module:
    if "float" in directory.name:
        options["quantization_config"] = Int8MoeConfig(skip=[skip] if skip else [])
    kind: Any = type(build_model("qwen3_moe"))
    model: nn.Module = kind.from_pretrained(directory, offload_folder=offload, **options)
    return model


@pytest.mark.parametrize("name", [f"{LAYER}.mlp.experts", f"{LAYER}.mlp.experts.down_proj", ""])
def test_experts_on_disk_are_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    device_map = {**ON_CPU, name: "disk"} if name else {"": "disk"}
    with pytest.raises(ValueError, match=r"^device_map: .*on disk are not supported, .*experts\."):
        load(checkpoint, tmp_path, device_map=device_map)


@pytest.mark.parametrize("word", ["auto", "sequential"])
def test_experts_that_would_be_put_on_disk_are_refused(
    checkpoint: Path, tmp_path: Path, word: str
) -> None:
    with pytest.raises(ValueError, match=r"^device_map: .*larger max_memory"):
        load(checkpoint, tmp_path, device_map=word, max_memory={"cpu": "120KB"})


@pytest.mark.parametrize("name", ["", "lm_head", f"{LAYER}.self_attn"])
def test_everything_else_may_lie_on_disk(checkpoint: Path, tmp_path: Path, name: str) -> None:
    wanted = load(checkpoint, tmp_path)
    loaded = load(checkpoint, tmp_path, device_map={**ON_CPU, **({name: "disk"} if name else {})})
    assert all(record_of(module) is not None for _, module in find_experts(loaded))
    with torch.no_grad():
        assert torch.equal(loaded(token_ids()).logits, wanted(token_ids()).logits)


def test_experts_that_stay_float_may_lie_on_disk(tmp_path: Path) -> None:
    build_model("qwen3_moe").save_pretrained(tmp_path / "float")
    device_map = {**ON_CPU, f"{LAYER}.mlp.experts": "disk"}
    loaded = load(tmp_path / "float", tmp_path, skip=LAYER, device_map=device_map)
    assert [record_of(module) is None for _, module in find_experts(loaded)] == [False, True]
