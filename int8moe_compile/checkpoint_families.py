"""Say from a config.json alone which experts the package cannot run, whatever their weights are.

It is what quantize_ finds out by running the model's own code, as far as names can tell it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# transformers' names of activations -> the operator's; tests compare them with what the modules
# compute. Every other one is refused.
ACTIVATIONS: Final[dict[str, str]] = {
    "silu": "silu",
    "swish": "silu",
    "quick_gelu": "silu",  # with alpha 1.702
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Where configurations name the activation of the experts; a family that has the first means it.
_FIELDS: Final = ("mlp_hidden_act", "hidden_activation", "hidden_act")
# Families whose code does not ask the configuration for the activation.
_FIXED: Final = ("gpt_oss", "openai_privacy_filter", "lfm2_moe", "minimax_m3_vl")
_OWN_CODE: Final = "they do not use transformers' experts interface (use_experts_implementation)"
_OTHER_GATE: Final = "their gate is none of the operator's"
# model_type -> why quantize_ leaves such experts in floating point.
UNSUPPORTED: Final[dict[str, str]] = {
    "dbrx": _OWN_CODE,
    "jetmoe": _OWN_CODE,
    "llama4": _OWN_CODE,
    "longcat_flash": _OWN_CODE,
    "nllb-moe": _OWN_CODE,
    "step3p5": _OWN_CODE,
    "step3p7": _OWN_CODE,
    "switch_transformers": _OWN_CODE,
    "inkling2": _OTHER_GATE,
    "inkling2_loop": _OTHER_GATE,
    "muse_spark": "they compute more than the operator does (post_expert_norm)",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and inner else config


def activation_of(config: Mapping[str, Any]) -> str:
    """Return the operator's name of the experts' activation, or the configuration's if it has none.

    config: of the language model.
    """
    if _family(config) in _FIXED:
        return "silu"
    words = (config.get(field) for field in _FIELDS)
    word = next((word for word in words if word is not None), "silu")
    return ACTIVATIONS.get(str(word), str(word))


def family_refusal(config: Mapping[str, Any]) -> str | None:
    """Say why no experts of a model can run in INT8, None if its configuration does not tell."""
    text = text_config(config)
    for part in (config, text):
        reason = UNSUPPORTED.get(_family(part))
        if reason is not None:
            return f"experts of model_type {_family(part)!r} stay in floating point: {reason}"
    activation = activation_of(text)
    if activation not in ACTIVATIONS.values():
        known = ", ".join(dict.fromkeys(ACTIVATIONS.values()))
        return f"the activation of the experts, {activation!r}, is none of {known}"
    return None


def _family(config: Mapping[str, Any]) -> str:
    """Return the model_type, that of the whole model for its part that handles text."""
    return str(config.get("model_type")).removesuffix("_text")
