"""Every decorated family that builds tiny: quantise while loading, save, reload, same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import COMMON, DEEPSEEK, EXPERTS, INTERMEDIATE, NARROW, experts_classes, widen
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from int8moe_compile.hf import Int8MoeConfig, find_experts
from int8moe_compile.quantization import quantize_

SIZES: dict[str, Any] = {
    **COMMON,
    **NARROW,
    **DEEPSEEK,
    "num_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "moe_intermediate_size": INTERMEDIATE,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts_shared": 1,
    "moe_k": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "conv_L_cache": 3,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
}
OWN: dict[str, dict[str, Any]] = {
    "gemma4": {"enable_moe_block": True},
    "lfm2_moe": {"num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}
# Fixed in their configurations at a value of their own.
LEFT_OUT = {"mistral4": ("qk_rope_head_dim",)}
# Their text models have no automatic class, or need more than sizes to have experts.
NOT_BUILT = {
    "deepseek_ocr2",
    "diffusion_gemma",
    "ernie4_5_vl_moe",
    "glm5_next",
    "qwen3_omni_moe",
}
MODELS = sorted({kind.model for kind in experts_classes()} - NOT_BUILT)


def tiny(name: str) -> nn.Module:
    """Build a model of a family with whatever sizes its configuration knows."""
    kind = next(kind for kind in experts_classes() if kind.model == name)
    cls = kind.config_cls
    known = {*vars(cls()), *vars(cls), *getattr(cls, "__dataclass_fields__", ())}
    left_out = LEFT_OUT.get(name, ())
    sizes = {key: value for key, value in SIZES.items() if key in known and key not in left_out}
    config = cls(**{**sizes, **OWN.get(name, {})})
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config)
    except ValueError:
        model = AutoModel.from_config(config)
    for _, experts in find_experts(model):
        widen(experts)
    return model.to(torch.bfloat16).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_save_and_reload_give_the_same_bits(tmp_path: Path, name: str):
    model = tiny(name)
    assert list(find_experts(model))
    model.save_pretrained(tmp_path / "float")
    kind = type(model)
    plain = kind.from_pretrained(tmp_path / "float")
    wanted = quantize_(copy.deepcopy(plain))
    loaded = kind.from_pretrained(tmp_path / "float", quantization_config=Int8MoeConfig())
    models = {"while loading": loaded}
    for word, one in (("quantised", wanted), ("loaded", loaded)):
        one.save_pretrained(tmp_path / word)
        models[word] = kind.from_pretrained(tmp_path / word)
    for word, one in models.items():
        state = one.state_dict()
        assert state.keys() == wanted.state_dict().keys()
        for key, value in wanted.state_dict().items():
            assert state[key].dtype == value.dtype and torch.equal(state[key], value), (word, key)
