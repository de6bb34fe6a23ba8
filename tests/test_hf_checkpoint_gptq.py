"""GPTQ with one scale per channel: experts load as weight-only int8, other layers as floats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import Written, check, load, scaled
from hf_formats import KEPT, gptq, packed, repack, written_as_gptq
from hf_models import token_ids

from int8moe_compile.checkpoint_config import read_config
from int8moe_compile.checkpoint_explain import explain_directory
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, reason_of, record_of
from int8moe_compile.hf.checkpoint_entries import claims

EXPERT = "model.layers.1.mlp.experts.3.gate_proj"
ATTENTION = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("g_idx", [True, False])
@pytest.mark.parametrize(
    ("fields", "zero"),
    [
        ({}, 127),
        ({"checkpoint_format": "gptq_v2"}, 128),
        ({"checkpoint_format": None, "desc_act": True}, 127),
        ({"sym": False}, 127),
        ({"bits": 4, "dynamic": {**KEPT, r"+:.*\.experts\.\d+\.": {"bits": 8}}}, 127),
    ],
)
def test_experts_load_as_weight_only(
    tmp_path: Path, fields: dict[str, Any], zero: int, g_idx: bool
):
    written = written_as_gptq(tmp_path, gptq(**fields), zero=zero)
    assert claims(written.config)
    if not g_idx:
        for name in [name for name in written.tensors if name.endswith("g_idx")]:
            del written.tensors[name]
    directory = written.save(tmp_path / "int8")
    loaded = load(directory, written)
    check(loaded, written)
    assert {record_of(module).scheme.name for _, module in find_experts(loaded)} == {"w8a16"}
    with torch.inference_mode():
        assert torch.isfinite(loaded(token_ids()).logits).all()
    layers = explain_directory(directory, device="cpu")
    assert [(layer.scheme, layer.accepted) for layer in layers] == [("w8a16", True)] * 2


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_other_layers_are_dequantised(tmp_path: Path, bits: int, asymmetric: bool):
    own = {r"+:.*q_proj": {"bits": bits, "group_size": 16, "sym": not asymmetric}, **KEPT}
    written = written_as_gptq(tmp_path, gptq(dynamic=own))
    generator = torch.Generator().manual_seed(bits)
    high = 1 << bits
    codes = torch.randint(0, high, (64, 64), generator=generator)
    zeros = torch.full((4, 64), high // 2)
    if asymmetric:
        zeros = torch.randint(1, high, (4, 64), generator=generator)
    scales = (torch.rand(4, 64, generator=generator) / high).half()
    groups = torch.randint(0, 4, (64,), generator=generator)
    del written.tensors[f"{ATTENTION}.weight"]
    written.tensors[f"{ATTENTION}.qweight"] = packed(codes, bits).t().contiguous()
    written.tensors[f"{ATTENTION}.qzeros"] = packed(zeros - 1, bits)
    written.tensors[f"{ATTENTION}.scales"] = scales
    written.tensors[f"{ATTENTION}.g_idx"] = groups.int()
    # GPTQ's own words: [K,N], every input with the zero point and the scale of its group.
    wanted = ((codes.t() - zeros[groups]) * scales.float()[groups]).t().to(torch.bfloat16)
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    assert torch.equal(loaded.get_parameter(f"{ATTENTION}.weight"), wanted)
    assert torch.equal(
        loaded.get_parameter("model.layers.1.self_attn.q_proj.weight"),
        written.tensors["model.layers.1.self_attn.q_proj.weight"],
    )


@pytest.mark.parametrize("group", [-1, 4])
def test_groups_that_are_not_there_are_refused(tmp_path: Path, group: int):
    own = {r"+:.*q_proj": {"group_size": 16}, **KEPT}
    written = written_as_gptq(tmp_path, gptq(dynamic=own))
    del written.tensors[f"{ATTENTION}.weight"]
    groups = torch.arange(64).int() // 16
    groups[5] = group
    written.tensors[f"{ATTENTION}.qweight"] = packed(torch.full((64, 64), 7)).t().contiguous()
    written.tensors[f"{ATTENTION}.qzeros"] = packed(torch.full((4, 64), 127))
    written.tensors[f"{ATTENTION}.scales"] = torch.ones(4, 64).half()
    written.tensors[f"{ATTENTION}.g_idx"] = groups
    with pytest.raises(CheckpointError, match=rf"q_proj\.g_idx: wanted groups.*3, got {group}"):
        load(written.save(tmp_path / "int8"), written)


def test_a_layer_left_out_in_part_becomes_float(tmp_path: Path):
    config = gptq(dynamic={**KEPT, rf"-:{EXPERT}": {}})
    written = written_as_gptq(tmp_path, config)
    exact = torch.randn(48, 64, dtype=torch.bfloat16)
    for ending in ("qweight", "qzeros", "scales", "g_idx"):
        del written.tensors[f"{EXPERT}.{ending}"]
    written.tensors[f"{EXPERT}.weight"] = exact
    with pytest.warns(UserWarning, match="only some of its projections"):
        loaded = load(written.save(tmp_path / "int8"), written)
    first, second = (module for _, module in find_experts(loaded))
    assert record_of(first) is not None and "only some" in str(reason_of(second))
    assert torch.equal(second.gate_up_proj[3, :48], exact)
    path = "model.layers.1.mlp.experts"
    codes, scales = written.codes[path, "w2"], written.scales[path, "w2"]
    wanted = (codes.float() * scales.unsqueeze(-1)).to(torch.bfloat16)
    assert torch.equal(second.down_proj, wanted)


def test_only_named_modules_are_quantised(tmp_path: Path):
    names = [["mlp.experts.gate_proj"], ["self_attn.k_proj", "self_attn.v_proj"]]
    config = read_config(gptq(dynamic=None, modules_in_block_to_quantize=names))
    assert config.keys_of(["model.layers.0.self_attn.k_proj"]) is not None
    assert config.keys_of(["model.layers.0.self_attn.q_proj"]) is None
    assert config.keys_of(["model.layers.0.self_attn.k_proj_norm"]) is None


def test_dynamic_settings_change_named_modules():
    dynamic = {r"-:.*k_proj": {}, r"+:.*v_proj": {"bits": 4}}
    names = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]]
    config = read_config(gptq(dynamic=dynamic, modules_in_block_to_quantize=names))
    keys = [config.keys_of([f"model.layers.0.self_attn.{name}_proj"]) for name in "qkv"]
    assert [each and each.weight_key and each.weight_key.bits for each in keys] == [8, None, 4]


WHERE = r"\(layer 1, expert 3, gate\)"
FAULTS: dict[str, tuple[str, Any, str]] = {
    "no zero points": ("qzeros", None, r"expert 3, gate\): wanted its qzeros, got none"),
    "no scales": ("scales", None, r"expert 3, gate\): wanted its scales, got none"),
    "groups": ("scales", lambda t: t.repeat(2, 1), rf"{WHERE}: wanted shape \[1, 48\], got \[2, 4"),
    "a float weight": ("qweight", lambda t: t.float(), rf"{WHERE}: wanted torch.int32"),
    "packed along outputs": ("qweight", lambda t: t.t(), r"wanted shape \[16, 48\], got \[48, 16"),
    "another zero point": ("qzeros", lambda t: t + 1, rf"{WHERE}.*got 1: asymmetric"),
    "reordered inputs": (
        "g_idx",
        lambda t: torch.arange(64).int(),
        rf"{WHERE}.*group 0.*got 63",
    ),
    "a scale of zero": ("scales", torch.zeros_like, rf"{WHERE}: wanted positive finite scales"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write one checkpoint; every fault is put into a copy of it."""
    return written_as_gptq(tmp_path_factory.mktemp("good"), gptq())


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_by_name(good: Written, tmp_path: Path, name: str):
    ending, change, message = FAULTS[name]
    tensors = dict(good.tensors)
    old = tensors.pop(f"{EXPERT}.{ending}")
    if change is not None:
        tensors[f"{EXPERT}.{ending}"] = change(old)
    with pytest.raises(CheckpointError, match=message):
        load(replace(good, tensors=tensors).save(tmp_path), good)


@pytest.mark.parametrize("ending", ["qweight", "qzeros", "scales", "g_idx"])
def test_faults_of_other_layers_are_refused_by_name(good: Written, tmp_path: Path, ending: str):
    tensors = dict(good.tensors)
    codes, scale = scaled(tensors.pop(f"{ATTENTION}.weight"))
    tensors[f"{ATTENTION}.weight"], tensors[f"{ATTENTION}.weight_scale"] = codes, scale
    repack(tensors, ATTENTION)
    load(replace(good, tensors=tensors).save(tmp_path / "good"), good)
    tensors[f"{ATTENTION}.{ending}"] = tensors[f"{ATTENTION}.{ending}"][:-1]
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj.*wanted"):
        load(replace(good, tensors=tensors).save(tmp_path / "bad"), good)


def test_the_format_has_to_be_known(good: Written, tmp_path: Path):
    fields = gptq(checkpoint_format="marlin")
    with pytest.raises(CheckpointError, match="checkpoint_format: wanted 'gptq' or 'gptq_v2'"):
        read_config(fields)
    wrong = replace(good, config=gptq(checkpoint_format="gptq_v2"))
    with pytest.raises(CheckpointError, match="got -1: asymmetric"):
        load(wrong.save(tmp_path), good)
    assert not claims(gptq(group_size=128)) and not claims(gptq(bits=4))
