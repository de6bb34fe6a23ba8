"""Write int8 experts as a compressed-tensors checkpoint: state dict, names and configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ..checkpoint_names import parse_name
from ..checkpoint_pack import pack_codes
from ..checkpoint_write import quantization_config
from ..passes.layouts import Which, interleave, to_hf_bias, to_hf_layout
from ..schemes import INT8_STATIC_TENSOR, Scheme
from .config import CheckpointQuantization
from .discovery import find_experts
from .record import ExpertsRecord, record_of
from .view import BIAS, INPUT_SCALE, SCALE, is_complete

_CANONICAL = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class SavedNames:
    """Translate a model's names into those of its family's checkpoints."""

    def __init__(self, model: Any) -> None:
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None:
            # What save_pretrained does for a model that was not loaded.
            defaults = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [item for item in defaults if not isinstance(item, PrefixChange)]
        reverse = [item.reverse_transform() for item in conversions[::-1]]
        self._renamings = [item for item in reverse if isinstance(item, WeightRenaming)]
        self._converters = [item for item in reverse if isinstance(item, WeightConverter)]
        self._model = model

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return a tensor's name in a checkpoint, and the pattern if a converter makes it."""
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, reverse=True)
        return str(renamed), pattern

    def split(self, name: str, experts: int, parts: int) -> dict[str, tuple[int, int]] | None:
        """Return the names that a weight is split into, each with its expert and part.

        None where the family does not save single experts. A stand-in whose values number experts
        and parts runs through the family's own converter, whatever that does.
        """
        renamed, pattern = self.rename(name)
        if pattern is None:
            return None
        (converter,) = (item for item in self._converters if pattern in item.source_patterns)
        fresh: Any = deepcopy(converter)
        fresh.add_tensor(renamed, name, pattern, torch.arange(experts * parts).view(-1, parts, 1))
        try:
            made = fresh.convert(renamed, model=self._model, config=self._model.config)
        except (ValueError, RuntimeError, LookupError, TypeError, AttributeError):
            return None
        found = {}
        for key, value in made.items():
            value = value[0] if isinstance(value, list) else value
            if value.numel() != 1 or parse_name(key) is None or self.rename(key)[0] != key:
                return None
            found[key] = divmod(int(value), parts)
        return found if len(found) == experts * parts else None


def state_dict_to_save(model: Any) -> dict[str, Tensor]:
    """Return a state dict in which int8 experts have the names and layouts of a checkpoint.

    Everything else stays as it is, for save_pretrained to rename. The model's configuration gets
    the matching ``quantization_config``, or loses the one it was loaded with if nothing is int8:
    all else was made float. Raises NotImplementedError for offloaded codes.
    """
    state: dict[str, Tensor] = dict(model.state_dict())
    names = SavedNames(model)
    schemes: dict[str, Scheme] = {}
    for path, module in find_experts(model):
        record = record_of(module)
        if record is None or not is_complete(module):
            continue
        for weight in _weights(path, module, record):
            for name in (weight.name, weight.name + SCALE, weight.name + INPUT_SCALE):
                state.pop(name, None)
            if record.structure.layout.has_bias:
                bias = state.pop(weight.name + BIAS)
                state.update(weight.biases(bias, names))
            state.update(weight.tensors(names))
        schemes[path] = record.scheme
    if schemes:
        fields = _configuration(model, names, schemes)
        model.config.quantization_config = CheckpointQuantization(fields)
    elif hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return state


@dataclass(frozen=True)
class _Weight:
    """Hold one int8 weight in our layout and all that describes it; N rows of E experts."""

    name: str
    which: Which
    record: ExpertsRecord
    codes: Tensor
    scale: Tensor
    input_scale: Tensor | None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the projections, in the order of their rows."""
        if self.which == "w2":
            return ("down",)
        return ("gate", "up") if self.record.structure.gate.gated else ("up",)

    def split(self, names: SavedNames) -> dict[str, tuple[int, int]] | None:
        """Return the names of single experts, None where all experts are saved as one tensor."""
        experts, parts = self.codes.shape[0], len(self.parts)
        found = names.split(self.name, experts, parts)
        if found is not None:
            return found
        if names.rename(self.name)[1] is None:
            return None
        # The family's converter reorders rows or experts; these names it does not touch.
        path = self.name.rpartition(".")[0]
        return {
            f"{path}.{expert}.{_CANONICAL[part]}.weight": (expert, index)
            for expert in range(experts)
            for index, part in enumerate(self.parts)
        }

    def tensors(self, names: SavedNames) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that stand for the weight in a checkpoint."""
        split = self.split(names)
        if split is None:
            yield from self._fused(names.rename(self.name)[0])
            return
        codes = self.codes.chunk(len(self.parts), dim=1)
        scales = self._scale_parts()
        packed = self.record.scheme.activation_key is None
        # The shapes that compressed-tensors gives its own parameters.
        shape = (1,) if self.record.scheme.weight_key == INT8_STATIC_TENSOR else (-1, 1)
        for name, (expert, part) in split.items():
            own = codes[part][expert].cpu().contiguous()
            if packed:
                yield f"{name}_packed", pack_codes(own)
                yield f"{name}_shape", torch.tensor(own.shape)
            else:
                yield name, own.clone()
            yield f"{name}_scale", scales[part][expert].cpu().reshape(shape).clone()
            if self.input_scale is not None:
                stem = name.removesuffix(".weight")
                yield f"{stem}.input_scale", self.input_scale.detach().cpu().reshape(1).clone()

    def _scale_parts(self) -> tuple[Tensor, ...]:
        """Return the scale of each projection, [E, rows] or [E, 1]."""
        if self.scale.shape[1] == 1:
            return (self.scale,) * len(self.parts)
        return self.scale.chunk(len(self.parts), dim=1)

    def _fused(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the layout of the family's own fused parameter."""
        layout = self.record.structure.layout
        yield name, to_hf_layout(self.codes, layout, self.which).cpu().contiguous().clone()
        scale = self.scale.cpu()
        if self.record.scheme.weight_key != INT8_STATIC_TENSOR:
            if self.which == "w13" and layout.interleaved:
                scale = interleave(scale)
            scale = scale.unsqueeze(1 if layout.transposed else 2)
        yield f"{name}_scale", scale.contiguous().clone()
        if self.input_scale is not None:
            yield f"{name}_input_scale", self.input_scale.detach().cpu().clone()

    def biases(self, bias: Tensor, names: SavedNames) -> Iterator[tuple[str, Tensor]]:
        """Yield the bias beside the weight, in the same split."""
        split = self.split(names)
        if split is None:
            yield self.name + BIAS, to_hf_bias(bias, self.record.structure.layout, self.which)
            return
        parts = bias.chunk(len(self.parts), dim=1)
        for name, (expert, part) in split.items():
            yield name.removesuffix("weight") + "bias", parts[part][expert].cpu().clone()


def _weights(path: str, module: nn.Module, record: ExpertsRecord) -> Iterator[_Weight]:
    """Yield both weights of a module."""
    whiches: tuple[Which, ...] = ("w13", "w2")
    for which in whiches:
        name = record.structure.w13_name if which == "w13" else record.structure.w2_name
        codes = getattr(module, name).detach()
        if codes.device.type == "meta":
            raise NotImplementedError(
                f"{path}.{name}: int8 experts that are offloaded cannot be saved; load the model "
                "onto one device first"
            )
        static = record.scheme.activation_quant == "static"
        input_scale = getattr(module, name + INPUT_SCALE) if static else None
        scale = getattr(module, name + SCALE)
        yield _Weight(f"{path}.{name}", which, record, codes, scale, input_scale)


def _configuration(model: Any, names: SavedNames, schemes: dict[str, Scheme]) -> dict[str, Any]:
    """Describe the checkpoint: every layer is a target, all that is float is ignored by name."""
    ignore = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        matrix = isinstance(weight, Tensor) and weight.dim() == 2
        if matrix and not isinstance(module, nn.Embedding):
            ignore.append(names.rename(f"{path}.weight")[0].removesuffix(".weight"))
    for path, _ in find_experts(model):
        if path not in schemes:
            block = _saved_block(names, path)
            ignore.append(f"re:{re.escape(block)}\\..*")
    distinct = dict.fromkeys(schemes.values())
    groups = [(scheme, ["Linear"]) for scheme in distinct]
    if len(distinct) > 1:
        groups = [
            (
                scheme,
                [
                    f"re:{re.escape(_saved_block(names, path))}\\..*"
                    for path, other in schemes.items()
                    if other == scheme
                ],
            )
            for scheme in distinct
        ]
    return quantization_config(groups, ignore)


def _saved_block(names: SavedNames, path: str) -> str:
    """Return the name up to the experts in a checkpoint."""
    for probe in ("gate_up_proj", "up_proj", "down_proj"):
        saved = parse_name(names.rename(f"{path}.{probe}")[0].replace("*", "0"))
        if saved is not None:
            return saved.block
    return path
