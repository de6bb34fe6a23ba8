"""The compressed-tensors package itself: what it writes loads here, what we write loads in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hf_checkpoints import Written, build, compressed, float_tensors, scaled
from hf_models import token_ids
from safetensors.torch import load_file

from int8moe_compile.hf import find_experts, reason_of, record_of
from int8moe_compile.ops.quantize import dequantize
from int8moe_compile.quantization import quantize_

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
)
from hf_package import GROUPS, linear_tree, matrices, written_by_the_package

SCHEMES = ("w8a8", "w8a8_tensor", "w8a8_static", "w8a16")


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
