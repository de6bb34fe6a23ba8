"""Write the checkpoints of the loader's tests in the words and layouts of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hf_checkpoints import Tensors, Written, build, float_tensors, layout_of, names_of, write
from torch import Tensor

from int8moe_compile.hf.discovery import find_experts
from int8moe_compile.passes.layouts import Which, from_hf_bias, from_hf_layout

# Patterns of GPTQ's for what stays float.
KEPT = {r"-:.*self_attn.*": {}, r"-:.*\.gate$": {}, r"-:.*router.*": {}, r"-:.*shared.*": {}}


def quark(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Say the same in the words of Quark."""

    def entry(fields: dict[str, Any]) -> dict[str, Any]:
        qscheme = "per_tensor" if fields["strategy"] == "tensor" else "per_channel"
        return {"dtype": "int8", "qscheme": qscheme, "is_dynamic": fields.get("dynamic", False)}

    overall = {"weight": entry(weights), "input_tensors": None if inputs is None else entry(inputs)}
    exclude = ["lm_head", "*self_attn*", "*gate", "*router*", "*shared*"]
    return {"quant_method": "quark", "global_quant_config": overall, "exclude": exclude}


def gptq(**fields: Any) -> dict[str, Any]:
    """Return a configuration of GPTQ."""
    common = {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True, "desc_act": False}
    return {**common, "checkpoint_format": "gptq", "dynamic": KEPT, "lm_head": False, **fields}


def packed(values: Tensor, bits: int = 8) -> Tensor:
    """Put unsigned values of a row [R,C] into int32 words [R, C * bits / 32], the first lowest."""
    values = values.long().unflatten(1, (-1, 32 // bits))
    words = (values << (torch.arange(32 // bits) * bits)).sum(-1)
    return (words - ((words >> 31) << 32)).int()


def repack(tensors: Tensors, name: str, *, zero: int = 127) -> None:
    """Replace codes [N,K] and scale [N,1] of a module by what GPTQ stores."""
    codes = tensors.pop(f"{name}.weight").int() + 128
    scale = tensors.pop(f"{name}.weight_scale")
    tensors[f"{name}.qweight"] = packed(codes).t().contiguous()
    tensors[f"{name}.qzeros"] = packed(torch.full((1, codes.shape[0]), zero))
    tensors[f"{name}.scales"] = scale.reshape(1, -1)
    tensors[f"{name}.g_idx"] = torch.zeros(codes.shape[1], dtype=torch.int32)


def written_as_gptq(
    directory: Path, config: dict[str, Any], *, zero: int = 127, **options: Any
) -> Written:
    """Write experts as GPTQ does, with scales in fp16."""
    written = write(directory, config=config, scale=lambda scale: scale.half(), **options)
    for name in [name for name in written.tensors if name.endswith(".weight_scale")]:
        repack(written.tensors, name.removesuffix(".weight_scale"), zero=zero)
    return written


def torchao(scheme: str) -> dict[str, Any]:
    """Return a configuration of torchao that names the experts' weights."""
    rows = {"_data": {"dim": -1}, "_type": "PerRow", "_version": 1}
    fields: dict[str, Any] = {"granularity": rows, "set_inductor_config": True}
    kind = "Int8WeightOnlyConfig"
    if scheme != "w8a16":
        kind = "Int8DynamicActivationInt8WeightConfig"
        mapping = {"_data": "SYMMETRIC", "_type": "MappingType"}
        fields |= {"act_mapping_type": mapping, "weight_only_decode": False, "reduce_range": False}
    if scheme == "w8a8_tensor":
        fields["granularity"] = {"_data": {}, "_type": "PerTensor", "_version": 1}
    entry = {"_data": fields, "_type": kind, "_version": 2}
    named = {rf"re:.*\.experts\.{name}": entry for name in ("gate_up_proj", "down_proj")}
    data = {"fqn_to_config": named, "module_fqn_to_config": named}
    quant_type = {"default": {"_data": data, "_type": "FqnToConfig", "_version": 1}}
    return {"quant_method": "torchao", "quant_type": quant_type, "modules_to_not_convert": None}


def described(scheme: str, block: list[int]) -> str:
    """Return what torchao writes into a header about one tensor."""
    inputs = None
    if scheme != "w8a16":
        granularity = {"_type": "PerRow", "_data": {"dim": -1}}
        if scheme == "w8a8_tensor":
            granularity = {"_type": "PerTensor", "_data": {}}
        mapping = {"_type": "MappingType", "_data": "SYMMETRIC"}
        fields = {"granularity": granularity, "mapping_type": mapping, "reduce_range": False}
        inputs = {"_type": "QuantizeTensorToInt8Kwargs", "_data": fields}
    dtype = {"_type": "torch.dtype", "_data": "bfloat16"}
    data = {"act_quant_kwargs": inputs, "reduce_range": False, "block_size": block, "dtype": dtype}
    names = ["zero_point", "qdata", "scale"]
    return json.dumps({"_type": "Int8Tensor", "_data": data, "_tensor_data_names": names})


def written_as_torchao(directory: Path, family: str, scheme: str, **options: Any) -> Written:
    """Write fused experts as torchao does: all of them with one scale, or one for each row."""
    model, layout = build(family, **options), layout_of(family)
    tensors = float_tensors(model, directory / "float")
    tensors = {name: t for name, t in tensors.items() if not _is_weight(name)}
    written = Written(model, tensors, torchao(scheme))
    inputs = 1 if layout.transposed else 2
    for path, experts in find_experts(model):
        whiches: tuple[Which, ...] = ("w13", "w2")
        for which in whiches:
            name = f"{path}.{names_of(experts)[which == 'w2']}"
            values = model.get_parameter(name).detach().float()
            dims = [0, 1, 2] if scheme == "w8a8_tensor" else [inputs]
            scale = values.abs().amax(dims, keepdim=True) / 127
            codes = (values / scale).round().clamp(-127, 127).to(torch.int8)
            block = [values.shape[dim] if dim in dims else 1 for dim in range(3)]
            stem = f"{path}._{name.rpartition('.')[2]}"
            tensors[f"{stem}_qdata"], tensors[f"{stem}_scale"] = codes, scale
            tensors[f"{stem}_zero_point"] = torch.zeros(scale.shape, dtype=torch.int8)
            written.metadata[name] = described(scheme, block)
            written.codes[path, which] = from_hf_layout(codes, layout, which)
            if scheme == "w8a8_tensor":
                wanted = scale.reshape(1, 1).expand(len(codes), 2 if which == "w13" else 1)
            else:
                wanted = from_hf_bias(scale.squeeze(inputs), layout, which)
            written.scales[path, which] = wanted
    return written


def _is_weight(name: str) -> bool:
    """Say whether a tensor of a float checkpoint is a weight of routed experts."""
    return (".experts." in name or "_linear.weight" in name) and not name.endswith("bias")
