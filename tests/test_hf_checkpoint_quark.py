"""AMD Quark: its words, its excludes and its zero points give the modules that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import check, load, scaled, write

from int8moe_compile.checkpoint_config import read_config
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, reason_of, record_of
from int8moe_compile.hf.experts import experts_arguments

KEPT = ("lm_head", "*self_attn*", "*mlp.gate")


def entry(qscheme: str, *, dynamic: bool | None = False, **more: Any) -> dict[str, Any]:
    """Return one tensor entry of a Quark configuration."""
    axis = 0 if qscheme == "per_channel" else None
    fields = {"dtype": "int8", "qscheme": qscheme, "is_dynamic": dynamic, "ch_axis": axis}
    return {**fields, "symmetric": True, "round_method": "half_even", **more}


def quark(
    weight: Any, inputs: Any, *, exclude: tuple[str, ...] = KEPT, **more: Any
) -> dict[str, Any]:
    """Return a configuration of Quark."""
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": list(exclude),
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real"},
        **more,
    }


CHANNEL, TENSOR = entry("per_channel"), entry("per_tensor")
TOKEN = entry("per_channel", dynamic=True)
STATIC, DYNAMIC = entry("per_tensor"), entry("per_tensor", dynamic=True)


@pytest.mark.parametrize(
    ("weight", "inputs", "word"),
    [
        (CHANNEL, TOKEN, "token"),
        (CHANNEL, {**TOKEN, "qscheme": "per_token"}, "token"),
        ([CHANNEL], [TOKEN], "token"),
        (TENSOR, DYNAMIC, "tensor"),
        (CHANNEL, STATIC, "static"),
        (TENSOR, STATIC, "static"),
        (CHANNEL, None, "none"),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_every_scheme_loads(tmp_path: Path, weight: Any, inputs: Any, word: str, zeros: bool):
    per_tensor = weight is TENSOR
    written = write(
        tmp_path,
        config=quark(weight, inputs),
        per_tensor=per_tensor,
        scale=lambda scale: scale.reshape(() if per_tensor else (-1,)),
        input_scale=(lambda _: torch.tensor(0.04)) if word == "static" else None,
    )
    if zeros:
        for name in [name for name in written.tensors if name.endswith("weight_scale")]:
            zero = torch.zeros(written.tensors[name].shape, dtype=torch.int8)
            written.tensors[name.replace("_scale", "_zero_point")] = zero
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    for _, module in find_experts(loaded):
        assert experts_arguments(module)["activation_quant"] == word


def test_attention_is_dequantised_unless_excluded(tmp_path: Path):
    config = quark(CHANNEL, TOKEN, exclude=("lm_head", "*mlp.gate", "o_proj"))
    written = write(tmp_path, config=config)
    for name in [name for name in written.tensors if name.endswith(("q_proj.weight",))]:
        codes, scale = scaled(written.tensors[name])
        written.tensors[name], written.tensors[f"{name}_scale"] = codes, scale.flatten()
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        wanted = written.tensors[name].float() * written.tensors[f"{name}_scale"][:, None]
        assert torch.equal(loaded.get_parameter(name), wanted.to(torch.bfloat16))


@pytest.mark.parametrize("field", ["exclude", "excludes"])
@pytest.mark.parametrize(
    ("spelt", "name", "ignored"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("q_proj", "model.layers.0.self_attn.k_proj", False),
        ("qkv_proj", "model.layers.0.self_attn.k_proj", True),
        ("qkv_proj", "model.layers.0.self_attn.o_proj", False),
        ("experts.3.gate_proj", "model.layers.1.mlp.experts.3.gate_proj", True),
        ("experts.3.gate_proj", "model.layers.1.mlp.experts.30.gate_proj", False),
        ("experts.3.gate_up_proj", "model.layers.1.mlp.experts.3.up_proj", True),
        ("experts", "model.layers.1.mlp.experts.3.gate_proj", True),
        ("experts", "model.layers.1.mlp.shared_experts.gate_proj", False),
        ("*.experts.*", "model.layers.1.mlp.experts.3.gate_proj", True),
        ("re:model.layers.1.*", "model.layers.1.mlp.experts.3.gate_proj", True),
        ("model.layers.1", "model.layers.11.mlp.experts.3.gate_proj", False),
    ],
)
def test_excludes_in_every_spelling(field: str, spelt: str, name: str, ignored: bool):
    config = {**quark(CHANNEL, TOKEN, exclude=()), field: [spelt]}
    assert (read_config(config).keys_of([name]) is None) == ignored


def test_an_excluded_projection_keeps_its_values(tmp_path: Path):
    excluded = "experts.3.gate_proj"
    written = write(tmp_path, config=quark(CHANNEL, TOKEN, exclude=(*KEPT, excluded)))
    exact = torch.randn(48, 64, dtype=torch.bfloat16)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.{excluded}.weight"
        del written.tensors[f"{name}_scale"]
        written.tensors[name] = exact.clone()
    with pytest.warns(UserWarning, match="only some of its projections"):
        loaded = load(written.save(tmp_path / "int8"), written)
    for _, module in find_experts(loaded):
        assert record_of(module) is None and "only some" in reason_of(module)
        assert torch.equal(module.gate_up_proj[3, :48], exact)


def test_one_layer_may_have_a_scheme_of_its_own(tmp_path: Path):
    own = {"*layers.1.mlp.experts*": {"weight": CHANNEL, "input_tensors": None}}
    written = write(tmp_path, config=quark(CHANNEL, TOKEN, layer_quant_config=own))
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    names = [record_of(module).scheme.name for _, module in find_experts(loaded)]
    assert names == ["w8a8", "w8a16"]
    loaded.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", written)
    check(again, written)
    assert names == [record_of(module).scheme.name for _, module in find_experts(again)]


def test_asymmetric_weights_are_refused_by_name(tmp_path: Path):
    written = write(tmp_path, config=quark({**CHANNEL, "symmetric": False}, TOKEN))
    name = "model.layers.1.mlp.experts.2.up_proj.weight_zero_point"
    written.tensors[name] = torch.full((48,), 3, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"layers\.1.*experts\.2.*asymmetric"):
        load(written.save(tmp_path / "int8"), written)
