"""A tiny language model of every transformers family with decorated experts, by discovery.

Sizes are set under whatever names a configuration class has; only what a family insists on is
written down. So a family of a later transformers is built, or fails by name, without an entry.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import hf_models
import torch
import transformers
from torch import nn

from int8moe_compile.hf import find_experts

SPARSE = ["sparse"] * hf_models.LAYERS
HYBRID = ["linear_attention", "full_attention"]
# Every name under which a configuration may keep one of the sizes of a tiny model.
SIZES: dict[str, Any] = {
    **hf_models.COMMON,
    "unpadded_vocab_size": hf_models.VOCAB,
    "intermediate_size": 96,
    "moe_intermediate_size": hf_models.INTERMEDIATE,
    "num_experts": hf_models.EXPERTS,
    "num_local_experts": hf_models.EXPERTS,
    "n_routed_experts": hf_models.EXPERTS,
    "moe_num_experts": hf_models.EXPERTS,
    "moe_k": hf_models.TOP_K,
    "num_experts_per_token": hf_models.TOP_K,
    "top_k_experts": hf_models.TOP_K,
    "head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": hf_models.LAYERS - 1,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "mlp_layer_types": SPARSE,
    "sliding_window": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Multi-head latent attention: head_dim follows from these, and every head has its own keys.
LATENT: dict[str, Any] = {**hf_models.LATENT, "v_head_dim": 16, "num_key_value_heads": 4}
# What a family insists on; None leaves its default. Some families of several attention kinds need
# one that is not linear, without which their cache has no length.
INSISTS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"mlp_layer_types": ["moe"] * hf_models.LAYERS, "o_groups": 2, "o_lora_rank": 8},
    "diffusion_gemma": {"vocab_size_per_layer_input": hf_models.VOCAB},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [hf_models.INTERMEDIATE] * 2,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [3, 3, 2]},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {
        "enable_moe_block": True,
        "vocab_size_per_layer_input": hf_models.VOCAB,
        "hidden_size_per_layer_input": 16,
    },
    "glm4v_moe": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 1, 2]}
    },
    "glm5_next": {
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "qk_rope_head_dim": 0,
    },
    "granitemoehybrid": {
        "layer_types": HYBRID,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
    },
    "hy_v4_vl": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}
    },
    "inkling": {
        "rel_extent": 256,
        "sliding_window_size": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
    },
    "minimax_m3_vl": {
        "intermediate_size": hf_models.INTERMEDIATE,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {"layer_types": HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"rope_parameters": None},
    "nemotron_h": hf_models.FAMILIES["nemotron_h"].options
    | {"num_hidden_layers": 2 * hf_models.LAYERS},
    "Qwen3OmniMoeTalkerModel": {"shared_expert_intermediate_size": 32},
    "qwen3_5_moe": {"layer_types": HYBRID},
    "qwen3_next": {"layer_types": HYBRID},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "qwen_sparse_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# Families that do not run with what they keep in fp32 in another dtype. (deepseek_v4 of 5.17 does
# not run the other way round.)
WIDE = frozenset({"inkling2", "inkling2_loop"})
# A part of a larger model that is given embeddings.
WITHOUT_IDS = frozenset({"Qwen3OmniMoeTalkerModel"})


@dataclass(frozen=True)
class Family:
    """Name a folder of transformers' models and its class for text with experts."""

    folder: str
    class_name: str

    @property
    def cls(self) -> Any:
        """Import the model class."""
        return getattr(_modeling(self.folder), self.class_name)


def _modeling(folder: str) -> Any:
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


@functools.cache
def families() -> list[Family]:
    """List, for every folder with decorated experts, its causal model or else its text models."""
    folders = sorted({kind.model for kind in hf_models.experts_classes()})
    return [Family(folder, name) for folder in folders for name in _class_names(folder)]


def _class_names(folder: str) -> list[str]:
    """Choose from the classes of a folder: Thinker and Talker of an omni model are both text."""
    module = _modeling(folder)
    models = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and issubclass(value, transformers.PreTrainedModel)
    }
    for endings in (("ForCausalLM",), ("ForTokenClassification",), ("TextModel", "TalkerModel")):
        found = {name: value for name, value in models.items() if name.endswith(endings)}
        if found:
            # A deprecated name is a subclass of the class of the new name.
            every = set(found.values())
            return [n for n, value in found.items() if not every & set(value.__mro__[1:])]
    return []


def supported() -> list[Family]:
    """List the families whose experts become the operator."""
    folders = {kind.model for kind in hf_models.supported_classes()}
    return [family for family in families() if family.folder in folders]


def refused() -> list[Family]:
    """List the families whose experts the operator does not compute."""
    return [family for family in families() if family not in supported()]


def configuration(family: Family, **options: Any) -> Any:
    """Build the tiny configuration of a family; options override it."""
    config_cls = family.cls.config_class
    known = config_cls().to_dict().keys() | config_cls.attribute_map.keys()
    sizes = SIZES | (LATENT | {"head_dim": None} if "kv_lora_rank" in known else {})
    sizes = {name: size for name, size in sizes.items() if name in known}
    sizes |= INSISTS.get(family.class_name, INSISTS.get(family.folder, {})) | options
    return config_cls(**{name: size for name, size in sizes.items() if size is not None})


def build(
    family: Family,
    *,
    implementation: str = "grouped_mm",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """Build a tiny model in eval mode whose experts matter; options override its configuration."""
    torch.manual_seed(seed)
    model: nn.Module = family.cls(configuration(family, **options)).to(dtype).eval()
    if family.folder in WIDE:
        keep_wide(model)
    model.set_experts_implementation(implementation)
    for _, experts in find_experts(model):
        hf_models.widen(experts, seed)
    return model


def keep_wide(model: Any) -> None:
    """Give what a family insists on keeping in fp32 back its dtype, as from_pretrained does."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(part in name for part in kept):
            tensor.data = tensor.data.float()


def inputs(family: Family, batch: int = 2, length: int = 12, seed: int = 1) -> dict[str, Any]:
    """Draw the inputs of one call, without a cache."""
    ids = hf_models.token_ids(batch, length, seed)
    if family.class_name not in WITHOUT_IDS:
        return {"input_ids": ids, "use_cache": False}
    generator = torch.Generator().manual_seed(seed)
    embedded = torch.randn(batch, length, hf_models.HIDDEN, generator=generator)
    return {"inputs_embeds": embedded.to(torch.bfloat16), "use_cache": False}


def outputs(result: Any) -> torch.Tensor:
    """Return logits, or the last hidden states of a model without a head."""
    found = getattr(result, "logits", None)
    return result.last_hidden_state if found is None else found
