"""Read the tensor names of checkpoints: which block, expert, projection and part a name means.

Every spelling that families of transformers use for routed experts is known here, so that a model
loads a checkpoint written in another family's spelling, too. Plain text work: no tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# Spelling of a projection -> the rows that it holds; "gate_up" holds both, gate first.
PROJECTIONS: Final[dict[str, str]] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "w13": "gate_up",
    "input_linear": "gate_up",
    "output_linear": "down",
}
# How a name may go on after the projection -> what the tensor is. The bare weight of a fused
# tensor has no ending of its own, and fused tensors join their endings with an underscore.
PARTS: Final[dict[str, str]] = {
    "": "weight",
    "weight": "weight",
    "qdata": "weight",
    "scale": "scale",
    "weight_scale": "scale",
    "input_scale": "input_scale",
    "packed": "packed",
    "weight_packed": "packed",
    "shape": "shape",
    "weight_shape": "shape",
    "zero_point": "zero_point",
    "weight_zero_point": "zero_point",
    "input_zero_point": "input_zero_point",
    "act_quant_scale": "input_scale",
    "act_quant_zero_point": "input_zero_point",
    "bias": "bias",
    "qweight": "qweight",
    "qzeros": "qzeros",
    "scales": "scales",
    "g_idx": "g_idx",
    "weight_g_idx": "g_idx",
}
# Endings of a quantised nn.Linear's tensors beside its weight; longest first.
LINEAR_PARTS: Final[dict[str, str]] = {
    "weight_zero_point": "zero_point",
    "input_zero_point": "input_zero_point",
    "weight_packed": "packed",
    "weight_g_idx": "g_idx",
    "weight_scale": "scale",
    "weight_shape": "shape",
    "input_scale": "input_scale",
    "qweight": "qweight",
    "qzeros": "qzeros",
    "scales": "scales",
    "g_idx": "g_idx",
}
GPTQ_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
# Where the values themselves lie, behind the projection.
WEIGHT_ENDINGS: Final = ("", ".weight", "_packed", ".weight_packed")

_SPELLINGS: Final = "|".join(sorted(PROJECTIONS, key=len, reverse=True))
_SEPARATE: Final = re.compile(
    rf"^(?P<block>(?:.+\.)?experts)\.(?P<expert>\d+)\.(?P<projection>{_SPELLINGS})\.(?P<part>\w+)$"
)
# torchao puts an underscore before a parameter's name, and the part behind it.
_FUSED: Final = re.compile(
    rf"^(?P<block>(?:.+\.)?experts)\._?(?P<projection>{_SPELLINGS})(?:[._](?P<part>\w+))?$"
)
_TORCHAO_LINEAR: Final = re.compile(r"^(?P<module>.+)\._(?P<parameter>weight|bias)_(?P<part>\w+)$")
_TORCHAO: Final = re.compile(r"^(?P<stem>(?P<module>.+)\._(?P<parameter>\w+?))_(?:qdata|scale)$")
_PACKED: Final = re.compile(
    r"^(?P<block>.+)\.(?P<projection>input_linear|output_linear)\.(?P<part>\w+)$"
)


@dataclass(frozen=True)
class TensorName:
    """Say what one tensor of a routed expert is.

    block: the name up to the experts. expert: None where one tensor holds all experts.
    projection: "gate", "up", "down" or "gate_up". spelling: the word that said so. part: a value
    of PARTS, or the unknown ending as it is.
    """

    block: str
    expert: int | None
    projection: str
    spelling: str
    part: str

    @property
    def module(self) -> str:
        """Return the name of the projection as quantisation configurations spell it."""
        middle = "" if self.expert is None else f"{self.expert}."
        return f"{self.block}.{middle}{self.spelling}"


def parse_name(key: str) -> TensorName | None:
    """Return what a tensor of routed experts is; None for every other tensor."""
    for pattern in (_SEPARATE, _FUSED, _PACKED):
        match = pattern.match(key)
        if match is not None:
            found = match.groupdict()
            expert, part = found.get("expert"), found["part"] or ""
            return TensorName(
                found["block"],
                None if expert is None else int(expert),
                PROJECTIONS[found["projection"]],
                found["projection"],
                PARTS.get(part, part),
            )
    return None


def split_linear(key: str) -> tuple[str, str] | None:
    """Return the parameter and the part of a tensor that only a quantised nn.Linear has."""
    match = _TORCHAO_LINEAR.match(key)
    if match is not None:
        part = PARTS.get(match["part"], match["part"])
        return f"{match['module']}.{match['parameter']}", part
    module, _, ending = key.rpartition(".")
    found = LINEAR_PARTS.get(ending)
    return None if found is None or not module else (f"{module}.weight", found)


def torchao_parameter(key: str) -> tuple[str, str] | None:
    """Return the parameter that codes or scales of torchao belong to, and the name of the codes."""
    match = _TORCHAO.match(key)
    if match is None:
        return None
    return f"{match['module']}.{match['parameter']}", f"{match['stem']}_qdata"


def layer_of(name: str) -> str:
    """Return the number of the layer that a dotted name lies in, "?" if it has none."""
    numbers = re.findall(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?=\.|$)", name)
    if not numbers:
        numbers = re.findall(r"\.(\d+)(?=\.)", name)
    return numbers[0] if numbers else "?"


def place(key: str) -> str:
    """Name a tensor with the layer, expert and projection that it belongs to, for messages."""
    name = parse_name(key)
    if name is None:
        return key
    expert = "all experts" if name.expert is None else f"expert {name.expert}"
    return f"{key} (layer {layer_of(name.block)}, {expert}, {name.projection})"
