"""The compressed-tensors package itself: what it writes loads here, what we write loads in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import Written, build, float_tensors
from hf_models import token_ids
from safetensors.torch import load_file
from torch import nn

from int8moe_compile.hf import find_experts, record_of
from int8moe_compile.ops.quantize import dequantize
from int8moe_compile.quantization import quantize_

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams

SCHEMES = ("w8a8", "w8a8_tensor", "w8a8_static", "w8a16")


def linear_tree(shapes: dict[str, torch.Size]) -> nn.Module:
    """Build the modules that the names of a checkpoint with single experts mean."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
        parent.add_module(last, layer.requires_grad_(False))
    return root


def matrices(model: nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """Return the float weights of single experts and of all other linear layers."""
    tensors = float_tensors(model, directory)
    return {
        name.removesuffix(".weight"): value
        for name, value in tensors.items()
        if value.dim() == 2 and name.endswith(".weight") and "embed" not in name
    }


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_package_reads_what_we_write(tmp_path: Path, family: str, scheme: str):
    model = build(family)
    calibration = [token_ids()] if scheme == "w8a8_static" else None
    quantize_(model, scheme, calibration=calibration).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(fields)
    tensors = load_file(tmp_path / "model.safetensors")
    floats = matrices(build(family), tmp_path / "float")
    tree = linear_tree({name: value.shape for name, value in floats.items()})
    apply_quantization_config(tree, config, run_compressed=False)
    compressor = ModelCompressor(config)
    compressor.compress_model(tree)
    wanted = set(tree.state_dict())
    assert wanted == {name for name in tensors if name.rpartition(".")[0] in floats}
    assert any("experts.0." in name and name.endswith("weight_scale") for name in wanted)
    tree.load_state_dict({name: tensors[name] for name in wanted})
    compressor.decompress_model(tree)
    for path, module in find_experts(model):
        gate_up = dequantize(module.gate_up_proj, module.gate_up_proj_scale, torch.bfloat16)
        block = path.replace(".mlp.", ".block_sparse_moe.") if family == "mixtral" else path
        word = "w3" if family == "mixtral" else "up_proj"
        for expert in range(8):
            ours = gate_up[expert, 48:]
            theirs = tree.get_parameter(f"{block}.{expert}.{word}.weight")
            # Their product is rounded twice, once with the scale in bf16.
            torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=0)


def written_by_the_package(model: nn.Module, directory: Path, group: dict[str, Any]) -> Written:
    """Quantise and compress single experts, and attention, with the package's own code."""
    floats = matrices(model, directory / "float")
    others = load_file(directory / "float" / "model.safetensors")
    tree = linear_tree({name: value.shape for name, value in floats.items()})
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], **group}},
        ignore=["lm_head", "re:.*mlp.gate$"],
    )
    tree.load_state_dict({f"{name}.weight": value for name, value in floats.items()})
    apply_quantization_config(tree, config)
    for module in tree.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        axis = None if scheme.weights.strategy == "tensor" else 1
        low, high = (
            (module.weight.amin(), module.weight.amax())
            if axis is None
            else (module.weight.amin(1, keepdim=True), module.weight.amax(1, keepdim=True))
        )
        scale, _ = calculate_qparams(low, high, scheme.weights)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.04)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(tree)
    compressor.compress_model(tree)
    state = {name: value.detach() for name, value in tree.state_dict().items()}
    others = {
        name: value for name, value in others.items() if name.rpartition(".")[0] not in floats
    }
    (directory / "int8").mkdir()
    (directory / "int8" / "config.json").write_text("{}")
    compressor.update_config(str(directory / "int8"))
    text = json.loads((directory / "int8" / "config.json").read_text())
    return Written(model, {**others, **state}, text["quantization_config"])


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
GROUPS = {
    "w8a8": {
        "weights": {**INT8, "strategy": "channel"},
        "input_activations": {**INT8, "strategy": "token", "dynamic": True},
    },
    "w8a8_tensor": {
        "weights": {**INT8, "strategy": "tensor"},
        "input_activations": {**INT8, "strategy": "tensor", "dynamic": True},
    },
    "w8a8_static": {
        "weights": {**INT8, "strategy": "channel"},
        "input_activations": {**INT8, "strategy": "tensor"},
    },
    "w8a16": {"weights": {**INT8, "strategy": "channel"}},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_we_read_what_the_package_writes(tmp_path: Path, scheme: str):
    model = build("qwen3_moe")
    written = written_by_the_package(model, tmp_path, GROUPS[scheme])
    loaded = type(model).from_pretrained(written.save(tmp_path / "int8"))
    packed = any(name.endswith("_packed") for name in written.tensors)
    assert packed == (scheme == "w8a16")
    for path, module in find_experts(loaded):
        assert record_of(module).scheme.name == scheme
        for expert in range(8):
            name = f"{path}.{expert}.down_proj.weight"
            scale = written.tensors[f"{name}_scale"].float().flatten()
            assert torch.equal(module.down_proj_scale[expert], scale)
            if not packed:
                assert torch.equal(module.down_proj[expert], written.tensors[name])
    before = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    after = dict(loaded.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    assert after.dtype == torch.bfloat16
    assert (after - before).abs().max() < 0.02 * before.abs().max()
    with torch.inference_mode():
        assert torch.isfinite(loaded(token_ids()).logits).all()
