"""Loading: every spelling, scale layout and scheme of compressed-tensors gives the same modules."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import (
    CHANNEL,
    DYNAMIC_TENSOR,
    GATE_UP_DOWN,
    STATIC_TENSOR,
    TENSOR,
    TOKEN,
    W1_W3_W2,
    check,
    compressed,
    fused,
    load,
    write,
)
from hf_models import token_ids

from int8moe_compile.checkpoint_pack import pack_codes
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, reason_of, record_of
from int8moe_compile.hf.experts import experts_arguments
from int8moe_compile.ops.quantize import dequantize
from int8moe_compile.schemes import (
    INT8_DYNAMIC_TENSOR,
    INT8_DYNAMIC_TOKEN,
    INT8_STATIC_CHANNEL,
    INT8_STATIC_TENSOR,
)

LAYERS = "model.layers.{layer}."


@pytest.mark.parametrize(
    ("family", "block", "spelling"),
    [
        ("mixtral", LAYERS + "block_sparse_moe.experts", W1_W3_W2),
        ("mixtral", LAYERS + "mlp.experts", GATE_UP_DOWN),
        ("qwen2_moe", LAYERS + "mlp.experts", GATE_UP_DOWN),
        ("qwen3_moe", LAYERS + "mlp.experts", GATE_UP_DOWN),
        ("qwen3_moe", LAYERS + "block_sparse_moe.experts", W1_W3_W2),
        ("qwen3_moe", "layers.{layer}.mlp.experts", GATE_UP_DOWN),
        ("deepseek_v3", LAYERS + "mlp.experts", GATE_UP_DOWN),
        ("gpt_oss", LAYERS + "mlp.experts", GATE_UP_DOWN),
        ("granitemoe", LAYERS + "block_sparse_moe.experts", GATE_UP_DOWN),
    ],
)
def test_single_experts_in_any_spelling(
    tmp_path: Path, family: str, block: str, spelling: tuple[str, str, str]
):
    written = write(tmp_path, family, block=block, spelling=spelling)
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    assert loaded.config._experts_implementation == "int8moe"
    with torch.inference_mode():
        assert torch.isfinite(loaded(token_ids()).logits).all()


@pytest.mark.parametrize("suffix", ["_scale", "_weight_scale", ".weight_scale"])
@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"),
        (
            "model.layers.0.block_sparse_moe.input_linear.weight",
            "model.layers.0.block_sparse_moe.output_linear.weight",
        ),
        (
            "model.layers.0.mlp.experts.gate_up_proj.weight",
            "model.layers.0.mlp.experts.down_proj.weight",
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_fused_experts_in_any_spelling(
    tmp_path: Path, family: str, names: tuple[str, str], suffix: str
):
    if names[0].endswith(".weight") != suffix.startswith("."):
        pytest.skip("no tool writes this")
    block = LAYERS + "mlp.experts"
    written = write(tmp_path, family, block=block)
    fused(written, 0, names, suffix)
    check(load(written.save(tmp_path / "int8"), written), written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_scales_of_any_layout_and_dtype(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype):
    written = write(tmp_path, scale=lambda scale: scale.reshape(shape).to(dtype))
    check(load(written.save(tmp_path / "int8"), written), written)


@pytest.mark.parametrize(
    ("weights", "inputs", "name", "word"),
    [
        (CHANNEL, TOKEN, "w8a8", "token"),
        (TENSOR, TOKEN, "w8a8", "token"),
        (CHANNEL, DYNAMIC_TENSOR, "w8a8_tensor", "tensor"),
        (TENSOR, DYNAMIC_TENSOR, "w8a8_tensor", "tensor"),
        (CHANNEL, STATIC_TENSOR, "w8a8_static", "static"),
        (TENSOR, STATIC_TENSOR, "w8a8_static", "static"),
        (CHANNEL, None, "w8a16", "none"),
    ],
)
def test_the_scheme_comes_from_both_entries(
    tmp_path: Path, weights: dict[str, Any], inputs: dict[str, Any] | None, name: str, word: str
):
    per_tensor = weights is TENSOR
    static = (lambda _: torch.tensor([0.04])) if inputs is STATIC_TENSOR else None
    config = compressed(weights, inputs)
    written = write(tmp_path, config=config, per_tensor=per_tensor, input_scale=static)
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    keys = {
        "token": INT8_DYNAMIC_TOKEN,
        "tensor": INT8_DYNAMIC_TENSOR,
        "static": INT8_STATIC_TENSOR,
        "none": None,
    }
    for _, module in find_experts(loaded):
        scheme = record_of(module).scheme
        assert scheme.name == name
        assert scheme.weight_key == (INT8_STATIC_TENSOR if per_tensor else INT8_STATIC_CHANNEL)
        assert scheme.activation_key == keys[word]
        assert experts_arguments(module)["activation_quant"] == word


def test_packed_weights_are_weight_only(tmp_path: Path):
    written = write(tmp_path, config=compressed(inputs=None, format="pack-quantized"))
    for name in [name for name in written.tensors if name.endswith("_scale")]:
        stem = name.removesuffix("_scale")
        codes = written.tensors.pop(stem)
        written.tensors[f"{stem}_packed"] = pack_codes(codes)
        written.tensors[f"{stem}_shape"] = torch.tensor(codes.shape)
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    assert {record_of(module).scheme.name for _, module in find_experts(loaded)} == {"w8a16"}


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.1",
        "model.layers.1.mlp.experts",
        "re:.*layers\\.1\\.mlp\\.experts.*",
        "re:model\\.layers\\.1\\.mlp\\.experts\\.\\d+\\.(gate|up|down)_proj$",
    ],
)
def test_an_ignored_layer_stays_as_it_was(tmp_path: Path, entry: str):
    config = compressed(ignore=("re:.*self_attn.*", "lm_head", "re:.*gate$", entry))
    written = write(tmp_path, config=config, skip=(1,), num_hidden_layers=3)
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    before = dict(find_experts(written.model))
    quantised = [record_of(module) is not None for _, module in find_experts(loaded)]
    assert quantised == [True, False, True]
    for path, module in find_experts(loaded):
        if record_of(module) is None:
            assert torch.equal(module.gate_up_proj, before[path].gate_up_proj)
            assert torch.equal(module.down_proj, before[path].down_proj)


def test_a_layer_ignored_in_part_becomes_float_with_a_reason(tmp_path: Path):
    ignored = "model.layers.1.mlp.experts.3.gate_proj"
    config = compressed(ignore=("re:.*self_attn.*", "lm_head", "re:.*gate$", ignored))
    written = write(tmp_path, config=config)
    del written.tensors[f"{ignored}.weight_scale"]
    exact = torch.randn(48, 64, dtype=torch.bfloat16)
    written.tensors[f"{ignored}.weight"] = exact
    with pytest.warns(UserWarning, match="only some of its projections"):
        loaded = load(written.save(tmp_path / "int8"), written)
    modules = dict(find_experts(loaded))
    first, second = (modules[f"model.layers.{layer}.mlp.experts"] for layer in (0, 1))
    assert record_of(first) is not None and record_of(second) is None
    assert "only some" in reason_of(second)
    assert torch.equal(second.gate_up_proj[3, :48], exact)
    codes, scale = (
        held["model.layers.1.mlp.experts", "w2"] for held in (written.codes, written.scales)
    )
    assert torch.equal(second.down_proj, dequantize(codes, scale, torch.bfloat16))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("up", [0.04, 0.05])
def test_gate_and_up_share_the_larger_input_scale(
    tmp_path: Path, up: float, shape: tuple[int, ...]
):
    scales = {"gate_proj": 0.04, "up_proj": up, "down_proj": 0.02}
    written = write(
        tmp_path,
        config=compressed(inputs=STATIC_TENSOR),
        input_scale=lambda word: torch.full(shape, scales[word]),
        num_hidden_layers=1,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(written.save(tmp_path / "int8"), written)
    about = [str(item.message) for item in caught if "input scales differ" in str(item.message)]
    assert len(about) == (up != 0.04)
    assert all("model.layers.0.mlp.experts" in text for text in about)
    ((_, module),) = find_experts(loaded)
    arguments = experts_arguments(module)
    assert torch.equal(arguments["a13_scale"], torch.tensor([up]))
    assert torch.equal(arguments["a2_scale"], torch.tensor([0.02]))


@pytest.mark.parametrize("value", [0, 3])
def test_zero_points_are_dropped_if_they_are_zero(tmp_path: Path, value: int):
    written = write(tmp_path, config=compressed({**CHANNEL, "symmetric": False}))
    for name in [name for name in written.tensors if name.endswith("weight_scale")]:
        shape = written.tensors[name].shape
        zeros = torch.full(shape, value, dtype=torch.int8)
        written.tensors[name.replace("weight_scale", "weight_zero_point")] = zeros
    directory = written.save(tmp_path / "int8")
    if value == 0:
        check(load(directory, written), written)
        return
    with pytest.raises(CheckpointError, match=r"zero_point \(layer 0, expert \d, \w+\).*got 3"):
        load(directory, written)
