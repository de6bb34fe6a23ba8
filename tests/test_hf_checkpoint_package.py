"""The compressed-tensors package itself: what it writes loads here, what we write loads in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_checkpoints import Written, build, compressed, float_tensors, scaled
from hf_models import token_ids
from safetensors.torch import load_file
from torch import nn

from int8moe_compile.hf import find_experts, reason_of, record_of
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


@pytest.mark.parametrize("scheme", ["w8a8_static", "w8a16"])
def test_dequantize_gives_float_experts(tmp_path: Path, scheme: str):
    model = build("qwen3_moe")
    written = written_by_the_package(model, tmp_path, GROUPS[scheme])
    wanted = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = type(model).from_pretrained(
        written.save(tmp_path / "int8"), quantization_config=wanted
    )
    before = dict(find_experts(model))
    for path, module in find_experts(loaded):
        assert record_of(module) is None and "as asked for" in str(reason_of(module))
        assert module.down_proj.dtype == torch.bfloat16
        error = (module.down_proj - before[path].down_proj).abs().max()
        assert error < 0.02 * before[path].down_proj.abs().max()
    with torch.inference_mode():
        assert torch.isfinite(loaded(token_ids()).logits).all()


def dense_checkpoint(directory: Path) -> Path:
    """Write an int8 checkpoint of a model without experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    written = Written(model, {}, compressed(ignore=("lm_head",)))
    for name, value in float_tensors(model, directory / "float").items():
        written.tensors[name] = value
        if value.dim() == 2 and "_proj" in name:
            codes, scale = scaled(value)
            written.tensors[name] = codes
            written.tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    return written.save(directory / "int8")


def test_a_dense_int8_checkpoint_is_left_to_transformers(tmp_path: Path):
    directory = dense_checkpoint(tmp_path)
    code = (
        "import sys, torch, transformers\n"
        "if sys.argv[2] == 'with': import int8moe_compile.hf\n"
        "m = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "with torch.inference_mode(): y = m(torch.arange(12)[None]).logits\n"
        "print(type(m.hf_quantizer), type(m.config.quantization_config), m.is_quantized,\n"
        "      m.quantization_method, sorted(m.state_dict()), y.float().sum().item())"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", code, str(directory), word],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for word in ("without", "with")
    ]
    assert seen[0] == seen[1] and "CompressedTensorsHfQuantizer" in seen[0]
