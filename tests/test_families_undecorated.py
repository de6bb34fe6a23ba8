"""Experts outside transformers' experts interface: named and refused by reason, never silent."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import hf_models
import pytest
import tiny_families
import torch
import transformers
from torch import nn

import int8moe_compile
from int8moe_compile.hf import find_experts, reason_of
from int8moe_compile.hf.unsupported import find_unsupported


@dataclass(frozen=True)
class Undecorated:
    """A model class, its configuration, the kind of its experts, how many, and why not."""

    config: str
    model: str
    options: dict[str, Any]
    kind: str
    groups: int
    why: str

    def build(self) -> nn.Module:
        config_cls = getattr(transformers, self.config)
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(config_cls(**self.options))
        with torch.no_grad():
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.02)
        return model.to(torch.bfloat16).eval()


SIZES = hf_models.COMMON
CASES = {
    "llama4": Undecorated(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**SIZES, **hf_models.NARROW, "intermediate_size_mlp": 96, "head_dim": 16},
        "Llama4TextExperts",
        2,
        "every expert sees every token",
    ),
    "step3p7": Undecorated(
        "Step3p7TextConfig",
        "Step3p7TextModel",
        {
            **SIZES,
            "intermediate_size": 96,
            "moe_intermediate_size": hf_models.INTERMEDIATE,
            "num_local_experts": hf_models.EXPERTS,
            "head_dim": 16,
            "sliding_window": 64,
            "layer_types": ["full_attention"] * 2,
            "mlp_layer_types": ["sparse"] * 2,
        },
        "Step3p7Experts",
        2,
        "clamped after its activation",
    ),
    "longcat_flash": Undecorated(
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            **SIZES,
            **tiny_families.LATENT,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": hf_models.INTERMEDIATE,
            "moe_topk": 2,
            "n_routed_experts": hf_models.EXPERTS,
            "zero_expert_num": 4,
        },
        "LongcatFlashExperts",
        2,
        "identity experts",
    ),
    "jetmoe": Undecorated(
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {**SIZES, **hf_models.NARROW, "kv_channels": 16},
        "JetMoeParallelExperts",
        8,  # two products each in attention and MLP
        "a module of its own",
    ),
    "dbrx": Undecorated(
        "DbrxConfig",
        "DbrxForCausalLM",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "vocab_size": hf_models.VOCAB,
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        },
        "DbrxExperts",
        2,
        "2-D weights",
    ),
    "switch_transformers": Undecorated(
        "SwitchTransformersConfig",
        "SwitchTransformersEncoderModel",
        {
            "vocab_size": hf_models.VOCAB,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "num_experts": 8,
            "num_sparse_encoder_layers": 2,
        },
        "SwitchTransformersExperts",
        2,
        "use_experts_implementation",
    ),
}


def unsupported(model: nn.Module) -> list[str]:
    return [type(module).__name__ for _, module in find_unsupported(model)]


@pytest.mark.parametrize("name", CASES)
def test_undecorated_experts_are_refused_by_reason(name: str) -> None:
    case = CASES[name]
    model = case.build()
    assert not list(find_experts(model))
    assert unsupported(model) == [case.kind] * case.groups
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = hf_models.token_ids()
    with torch.no_grad():
        wanted = model(ids).last_hidden_state if case.model[-5:] == "Model" else model(ids).logits
    with pytest.warns(UserWarning, match=f"left as it was: .*{case.kind}.*{case.why}") as caught:
        assert int8moe_compile.quantize_(model) is model
    assert len(caught) == 1, "one warning a reason"
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    with torch.no_grad():
        result = model(ids).last_hidden_state if case.model[-5:] == "Model" else model(ids).logits
    assert torch.equal(result, wanted)


@pytest.mark.parametrize("name", CASES)
def test_explain_lists_undecorated_experts(name: str) -> None:
    case = CASES[name]
    model = case.build()
    rows = int8moe_compile.explain(model)
    assert len(rows) == case.groups
    for row in rows:
        module = model.get_submodule(row.name)
        assert type(module).__name__ == row.kind == case.kind
        assert not row.accepted and row.scheme is None and row.backend is None
        assert case.kind in row.reason and case.why in row.reason
        size = sum(parameter.nbytes for parameter in module.parameters())
        assert row.bytes_before == row.bytes_after == size > 0
    assert case.kind in str(rows)


def test_skipping_them_by_name_is_no_reason_to_warn() -> None:
    model = CASES["llama4"].build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        int8moe_compile.quantize_(model, skip="*.experts")


def test_beside_supported_experts_only_the_others_are_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = None
            self.decorated = hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
            self.other = CASES["llama4"].build().model.layers[0].feed_forward

    model = Both()
    with pytest.warns(UserWarning, match=r"other\.experts: Llama4TextExperts"):
        int8moe_compile.quantize_(model)
    assert model.decorated.gate_up_proj.dtype == torch.int8
    assert "Llama4TextExperts" in (reason_of(model.other.experts) or "")
    rows = int8moe_compile.explain(model)
    assert [(row.name, row.accepted) for row in rows] == [
        ("decorated", True),
        ("other.experts", False),
    ]


def test_decorated_experts_with_a_step_of_their_own_are_refused() -> None:
    # As muse_spark of transformers 5.24: the operator would leave the norm out without a word.
    experts = hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
    experts.post_expert_norm = nn.LayerNorm(hf_models.HIDDEN)
    experts.has_post_expert_norm = True
    with pytest.warns(UserWarning, match=r"more than the operator.*post_expert_norm\.weight"):
        int8moe_compile.quantize_(experts)
    assert experts.gate_up_proj.dtype == torch.bfloat16
    (row,) = int8moe_compile.explain(experts)
    assert not row.accepted and "has_post_expert_norm" in row.reason


def test_list_of_expert_modules_is_named() -> None:
    # Models with code of their own keep experts like this.
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    model.gate = nn.Linear(8, 4)
    with pytest.warns(UserWarning, match="experts: ModuleList is not supported"):
        int8moe_compile.quantize_(model)


def test_no_experts_at_all_is_an_error() -> None:
    model = nn.Sequential(nn.Conv1d(8, 8, 3, groups=8), nn.Linear(8, 8), nn.Embedding(8, 8))
    with pytest.raises(ValueError, match="without any"):
        int8moe_compile.quantize_(model)


@pytest.mark.parametrize("family", tiny_families.refused(), ids=lambda family: family.class_name)
def test_family_that_the_operator_does_not_compute_is_refused(
    family: tiny_families.Family,
) -> None:
    model, inputs = tiny_families.build(family), tiny_families.inputs(family)
    with torch.no_grad():
        wanted = tiny_families.outputs(model(**inputs))
    with pytest.warns(UserWarning, match="left as it was"):
        int8moe_compile.quantize_(model)
    rows = int8moe_compile.explain(model)
    assert len(rows) == len(list(find_experts(model))) >= hf_models.LAYERS
    for row in rows:
        assert not row.accepted and row.bytes_after == row.bytes_before > 0
        assert hf_models.REFUSALS[row.kind] in row.reason
    with torch.no_grad():
        assert torch.equal(tiny_families.outputs(model(**inputs)), wanted)


@pytest.mark.parametrize("family", tiny_families.families(), ids=lambda family: family.class_name)
def test_nothing_in_a_supported_family_is_taken_for_undecorated(
    family: tiny_families.Family,
) -> None:
    model = tiny_families.build(family)
    assert list(find_experts(model))
    assert unsupported(copy.copy(model)) == []
