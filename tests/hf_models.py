"""Tiny Hugging Face mixture-of-experts models and experts modules that the tests share.

A tiny model: 2 layers, hidden 64, intermediate 48, 8 experts, top-2, random bf16, expert weights of
standard deviation about 2 / sqrt(fan-in), so that a wrong expert shows in the logits.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from int8moe_compile.hf.discovery import find_experts

VOCAB, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 128, 64, 48, 8, 2, 2

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NARROW = {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
DEEPSEEK = {
    **LATENT,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}


@dataclass(frozen=True)
class Recipe:
    """Name the classes of a family and what its configuration needs beside COMMON."""

    config: str
    model: str
    options: dict[str, Any]


FAMILIES: dict[str, Recipe] = {
    "mixtral": Recipe("MixtralConfig", "MixtralForCausalLM", NARROW),
    "qwen2_moe": Recipe(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": INTERMEDIATE,
            "shared_expert_intermediate_size": 32,
            "num_experts": EXPERTS,
        },
    ),
    "qwen3_moe": Recipe(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": INTERMEDIATE,
            "num_experts": EXPERTS,
            "head_dim": 16,
        },
    ),
    "olmoe": Recipe(
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"intermediate_size": INTERMEDIATE, "num_experts": EXPERTS},
    ),
    "deepseek_v3": Recipe("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek_v2": Recipe("DeepseekV2Config", "DeepseekV2ForCausalLM", DEEPSEEK),
    "gpt_oss": Recipe("GptOssConfig", "GptOssForCausalLM", {**NARROW, "head_dim": 16}),
    "nemotron_h": Recipe(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["attention", "moe"] * LAYERS,
            "num_hidden_layers": 2 * LAYERS,
            "intermediate_size": 96,
            "moe_intermediate_size": INTERMEDIATE,
            "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
        },
    ),
}


def build_model(
    family: str,
    *,
    implementation: str = "grouped_mm",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """Build a tiny model in eval mode; options override its configuration."""
    recipe = FAMILIES[family]
    values = {**COMMON, **recipe.options, **options}
    config = getattr(transformers, recipe.config)(**values)
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, recipe.model)(config).to(dtype).eval()
    model.set_experts_implementation(implementation)
    for _, experts in find_experts(model):
        widen(experts, seed)
    return model


def widen(experts: nn.Module, seed: int = 0) -> None:
    """Fill an experts module with random weights that matter, biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in experts.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 3:
                values *= 2.0 / parameter.shape[1 if experts.is_transposed else 2] ** 0.5
            parameter.copy_(values)


def token_ids(batch: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    """Draw token ids for a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


@dataclass(frozen=True)
class ExpertsClass:
    """Name one decorated experts class of transformers and the text of its ``__init__``."""

    model: str
    name: str
    init: str

    @property
    def cls(self) -> type[nn.Module]:
        """Import the class."""
        path = f"transformers.models.{self.model}.modeling_{self.model}"
        return getattr(importlib.import_module(path), self.name)

    @property
    def config_cls(self) -> type:
        """Find the configuration class that the experts take, which is the text one of several."""
        path = f"transformers.models.{self.model}.configuration_{self.model}"
        module = importlib.import_module(path)
        found = {
            name: value
            for name, value in vars(module).items()
            if inspect.isclass(value)
            and value.__module__ == path
            and issubclass(value, transformers.PreTrainedConfig)
        }
        named = re.search(r"config: (\w+)", self.init)
        for wanted in (TEXT_CONFIGS.get(self.name), named and named.group(1)):
            if wanted in found:
                return found[wanted]
        texts = [value for name, value in found.items() if "Text" in name]
        (one,) = texts if texts else found.values()
        return one


TEXT_CONFIGS = {
    "Qwen3OmniMoeThinkerTextExperts": "Qwen3OmniMoeTextConfig",
    "Qwen3OmniMoeTalkerTextExperts": "Qwen3OmniMoeTalkerTextConfig",
    "Ernie4_5_VLMoeMoeExperts": "Ernie4_5_VLMoeTextConfig",
}


# Classes of later transformers that the operator does not compute, with a part of the reason.
REFUSALS = {
    "Inkling2Experts": "its gate is no clamped or plain product",
    "Inkling2LoopExperts": "its gate is no clamped or plain product",
    "MuseSparkExperts": "it computes more than the operator does: post_expert_norm.weight",
}


@functools.cache
def experts_classes() -> list[ExpertsClass]:
    """List every class of transformers that carries the experts decorator, without importing it."""
    found = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "use_experts_implementation" not in text:
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef):
                continue
            decorators = " ".join(ast.unparse(item) for item in node.decorator_list)
            if "use_experts_implementation" in decorators:
                inits = [item for item in node.body if getattr(item, "name", "") == "__init__"]
                found.append(ExpertsClass(path.parent.name, node.name, ast.unparse(inits[0])))
    return found


def supported_classes() -> list[ExpertsClass]:
    """List those of them that become one operator; no other may be left out."""
    return [kind for kind in experts_classes() if kind.name not in REFUSALS]


def experts_class(name: str) -> ExpertsClass:
    """Return one of them by name."""
    (found,) = (item for item in experts_classes() if item.name == name)
    return found


def build_experts(
    kind: ExpertsClass,
    *,
    implementation: str = "grouped_mm",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """Build an experts module alone; options override its configuration."""
    config = kind.config_cls()
    takes_size = kind.name == "Ernie4_5_VLMoeMoeExperts"
    sizes = {
        "hidden_size": HIDDEN,
        "moe_hidden_size": HIDDEN,
        "moe_intermediate_size": [INTERMEDIATE] * 2 if takes_size else INTERMEDIATE,
        "intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        **options,
    }
    for name, value in sizes.items():
        setattr(config, name, value)
    config._experts_implementation = implementation
    extra = {"intermediate_size": INTERMEDIATE} if takes_size else {}
    experts = kind.cls(config, **extra)
    widen(experts, seed)
    return experts.to(dtype).eval().requires_grad_(False)


def routed(
    tokens: int = 7, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, expert ids and router weights for an experts module."""
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1)
    weights, ids = scores.topk(TOP_K, dim=-1)
    return hidden_states, ids, (weights / weights.sum(-1, keepdim=True)).to(dtype)


def rounded_to_int8(experts: nn.Module, *, per_tensor: bool = False) -> nn.Module:
    """Round a float module's weights to int8 and back, in Hugging Face's own layout.

    An independent statement of what quantise_ does: channels are the output features, per tensor
    keeps gate and up apart.
    """
    interleaved = not experts.is_concatenated
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        weight = getattr(experts, name)
        outputs, inputs = (2, 1) if experts.is_transposed else (1, 2)
        amax = weight.data.float().abs().amax(inputs, keepdim=True)
        if per_tensor and name == "gate_up_proj":
            size = amax.shape[outputs]
            index = torch.arange(size)
            is_up = index % 2 == 1 if interleaved else index >= size // 2
            for half in (is_up, ~is_up):
                chosen = index[half]
                largest = amax.index_select(outputs, chosen).amax(outputs, keepdim=True)
                amax.index_copy_(
                    outputs, chosen, largest.expand_as(amax.index_select(outputs, chosen))
                )
        elif per_tensor:
            amax = amax.amax(outputs, keepdim=True)
        scale = amax / 127
        codes = (weight.data.float() / scale).round().clamp(-127, 127)
        weight.data = (codes * scale).to(weight.dtype)
    return experts


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return the L2 norm of the difference over that of the wanted values."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())
