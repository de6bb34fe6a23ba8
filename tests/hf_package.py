"""Write checkpoints with the compressed-tensors package itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from hf_checkpoints import Written, float_tensors
from safetensors.torch import load_file
from torch import nn


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


def written_by_the_package(
    model: nn.Module,
    directory: Path,
    group: dict[str, Any],
    *,
    ignore: tuple[str, ...] = ("lm_head", "re:.*mlp.gate$"),
    input_scale: Callable[[str], float] = lambda name: 0.04,
) -> Written:
    """Quantise and compress single experts, and attention, with the package's own code.

    input_scale: gives the static scale of a layer by its name.
    """
    floats = matrices(model, directory / "float")
    others = load_file(directory / "float" / "model.safetensors")
    tree = linear_tree({name: value.shape for name, value in floats.items()})
    config = QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], **group}},
        ignore=list(ignore),
    )
    tree.load_state_dict({f"{name}.weight": value for name, value in floats.items()})
    apply_quantization_config(tree, config)
    for name, module in tree.named_modules():
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
            module.input_scale.data.fill_(input_scale(name))
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
