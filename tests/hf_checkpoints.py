"""Write small INT8 checkpoints the way other tools do, tensor by tensor, for the loader's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_models import COMMON, NARROW, build_model, widen
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from int8moe_compile.hf.discovery import find_experts
from int8moe_compile.passes.layouts import from_hf_bias, from_hf_layout
from int8moe_compile.structure import Layout

Tensors = dict[str, Tensor]
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TENSOR = {**CHANNEL, "strategy": "tensor"}
TOKEN = {**CHANNEL, "strategy": "token", "dynamic": True}
DYNAMIC_TENSOR = {**TENSOR, "dynamic": True}
STATIC_TENSOR = {**TENSOR, "dynamic": False}


@dataclass(frozen=True)
class Written:
    """Hold a checkpoint before it is on disk: its tensors, its configuration, what it means.

    codes and scales: by module path and weight, in our layout, as loading has to give them.
    metadata: what else the header of the file says.
    """

    model: nn.Module
    tensors: Tensors
    config: dict[str, Any]
    codes: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    scales: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def save(self, directory: Path) -> Path:
        """Write the files and return the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(directory)
        text = json.loads((directory / "config.json").read_text())
        text["quantization_config"] = self.config
        text["architectures"] = [type(self.model).__name__]
        text["dtype"] = "bfloat16"
        (directory / "config.json").write_text(json.dumps(text))
        tensors = {name: value.contiguous() for name, value in self.tensors.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt", **self.metadata})
        return directory


def build(family: str, **options: Any) -> nn.Module:
    """Build a tiny model; Granite's is needed for these tests alone."""
    if family != "granitemoe":
        return build_model(family, **options)
    config = transformers.GraniteMoeConfig(**COMMON, **NARROW, **options)
    torch.manual_seed(0)
    model = transformers.GraniteMoeForCausalLM(config).to(torch.bfloat16).eval()
    for _, experts in find_experts(model):
        widen(experts)
    return model


def compressed(
    weights: dict[str, Any] = CHANNEL,
    inputs: dict[str, Any] | None = TOKEN,
    *,
    ignore: tuple[str, ...] = ("re:.*self_attn.*", "lm_head", "re:.*gate$", "re:.*shared.*"),
    targets: tuple[str, ...] = ("Linear",),
    format: str = "int-quantized",
) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }


def scaled(rows: Tensor, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise one projection [N,K] plainly; return codes and scale [N,1] or [1]."""
    values = rows.float()
    amax = values.abs().amax() if per_tensor else values.abs().amax(dim=1, keepdim=True)
    scale = amax / 127
    return (values / scale).round().clamp(-127, 127).to(torch.int8), scale.reshape(-1, 1)[:, :1]


def float_tensors(model: nn.Module, directory: Path) -> Tensors:
    """Return the float checkpoint of a model, in its family's own names."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def write(
    directory: Path,
    family: str = "qwen3_moe",
    *,
    block: str = "model.layers.{layer}.mlp.experts",
    spelling: tuple[str, str, str] = GATE_UP_DOWN,
    config: dict[str, Any] | None = None,
    per_tensor: bool = False,
    scale: Callable[[Tensor], Tensor] = lambda scale: scale,
    input_scale: Callable[[str], Tensor] | None = None,
    skip: tuple[int, ...] = (),
    model: nn.Module | None = None,
    **options: Any,
) -> Written:
    """Write experts one by one, everything else as the family does; model: a tiny one by default.

    scale: brings a scale [N,1] or [1,1] into the wanted shape and dtype. input_scale: gives the
    static scale of a projection. skip: layers whose experts stay float.
    """
    model = model or build(family, **options)
    others = float_tensors(model, directory / "float")
    written = Written(model, {}, config or compressed())
    layout = layout_of(family)
    for layer, (path, experts) in enumerate(find_experts(model)):
        if layer in skip:
            continue
        others = {name: t for name, t in others.items() if not of_experts(name, layer)}
        w13 = from_hf_layout(experts.get_parameter(names_of(experts)[0]).detach(), layout, "w13")
        w2 = from_hf_layout(experts.get_parameter("down_proj").detach(), layout, "w2")
        gated = w13.shape[1] == 2 * w2.shape[2]
        parts = w13.chunk(2, dim=1) if gated else (w13,)
        words = spelling[:2] if gated else spelling[1:2]
        for weight, projections, tensors in (("w13", words, parts), ("w2", spelling[2:], (w2,))):
            codes, scales = [], []
            for word, tensor in zip(projections, tensors, strict=True):
                pairs = [scaled(expert, per_tensor) for expert in tensor]
                codes.append(torch.stack([pair[0] for pair in pairs]))
                stored = [scale(pair[1]) for pair in pairs]
                scales.append(torch.stack([value.float().flatten() for value in stored]))
                for expert, (code, _) in enumerate(pairs):
                    name = f"{block.format(layer=layer)}.{expert}.{word}"
                    written.tensors[f"{name}.weight"] = code
                    written.tensors[f"{name}.weight_scale"] = stored[expert]
                    if input_scale is not None:
                        written.tensors[f"{name}.input_scale"] = input_scale(word)
            written.codes[path, weight] = torch.cat(codes, dim=1)
            written.scales[path, weight] = torch.cat(scales, dim=1)
        if layout.has_bias:
            add_biases(written, experts, layout, block.format(layer=layer), spelling)
    written.tensors.update(others)
    return written


def layout_of(family: str) -> Layout:
    """Return how a family lays out its weights."""
    layouts = {"gpt_oss": Layout(transposed=True, interleaved=True, has_bias=True)}
    return layouts.get(family, Layout())


def names_of(experts: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def add_biases(
    written: Written, experts: nn.Module, layout: Layout, block: str, spelling: tuple[str, ...]
) -> None:
    """Write the biases of single experts."""
    w13 = from_hf_bias(experts.gate_up_proj_bias.detach(), layout, "w13").chunk(2, dim=1)
    for word, bias in zip(spelling, (*w13, experts.down_proj_bias.detach()), strict=True):
        for expert, row in enumerate(bias):
            written.tensors[f"{block}.{expert}.{word}.bias"] = row.clone()


def of_experts(name: str, layer: int) -> bool:
    """Say whether a tensor of a float checkpoint belongs to the routed experts of a layer."""
    number = 2 * layer + 1 if name.startswith("backbone") else layer
    routed = ".experts." in name or "_linear.weight" in name
    return routed and f".layers.{number}." in name


def fused(written: Written, layer: int, names: tuple[str, str], suffix: str = "_scale") -> None:
    """Replace the tensors of single experts of one layer by two fused ones."""
    paths = sorted({path for path, _ in written.codes})
    path = paths[layer]
    for name in [name for name in written.tensors if of_experts(name, layer)]:
        del written.tensors[name]
    for weight, name in zip(("w13", "w2"), names, strict=True):
        written.tensors[name] = written.codes[path, weight].clone()
        stem = name.removesuffix(".weight") if suffix.startswith(".") else name
        written.tensors[stem + suffix] = written.scales[path, weight].clone()


def load(directory: Path, written: Written, **options: Any) -> nn.Module:
    """Load a checkpoint through transformers."""
    loaded: nn.Module = type(written.model).from_pretrained(directory, **options)
    return loaded


def check(loaded: nn.Module, written: Written) -> None:
    """Compare codes and scales of every quantised module with what was written."""
    modules = dict(find_experts(loaded))
    assert written.codes
    for (path, weight), codes in written.codes.items():
        module = modules[path]
        name = names_of(module)[weight == "w2"]
        assert torch.equal(getattr(module, name), codes), (path, weight)
        scale = getattr(module, name + "_scale")
        assert scale.dtype == torch.float32
        assert torch.equal(scale, written.scales[path, weight]), (path, weight)
