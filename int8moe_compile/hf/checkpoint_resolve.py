"""Find the experts module that a checkpoint's names mean, and the parameter of any other name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ..checkpoint_names import TensorName

# Whatever a family calls the projections of one expert, one of these is among its own names.
_PROBES: Final = (
    "{}.0.gate_proj.weight",
    "{}.0.down_proj.weight",
    "{}.0.up_proj.weight",
    "{}.0.w1.weight",
    "{}.0.w2.weight",
    "{}.gate_up_proj",
    "{}.down_proj",
    "{}.up_proj",
    "{}.input_linear.weight",
    "{}.output_linear.weight",
)


class Names:
    """Translate names of a checkpoint into those of a model, as transformers' loader will."""

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        self.renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
        self.converters = [item for item in conversions if isinstance(item, WeightConverter)]
        self.by_pattern: dict[str, WeightConverter] = {
            pattern: converter
            for converter in self.converters
            for pattern in converter.source_patterns
        }
        self.model = model
        self.state: dict[str, Any] = model.state_dict()
        self._kept_dtypes: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
        self._prefix: str = model.base_model_prefix
        self._blocks: dict[str, str | None] = {}

    def dtype_of(self, target: str) -> torch.dtype:
        """Return the dtype that transformers gives a float parameter of an unquantised model."""
        dtype: torch.dtype = self.state[target].dtype
        for part, kept in self._kept_dtypes.items():
            if re.search(part.replace("*", ".*"), target):
                dtype = kept
        return dtype

    def rename(self, key: str) -> tuple[str, WeightConverter | None, str]:
        """Return the parameter, the converter that makes it and the pattern that matched."""
        renamed, pattern = rename_source_key(
            key, self.renamings, self.converters, self._prefix, self.state
        )
        if renamed not in self.state and key in self.state:
            renamed, pattern = rename_source_key(key, [], [], self._prefix, self.state)
        if pattern is None:
            return renamed, None, key
        return renamed, self.by_pattern[pattern], pattern

    def targets(self, key: str) -> list[str]:
        """Return every parameter that a tensor helps to make."""
        renamed, converter, _ = self.rename(key)
        if converter is None:
            return [renamed]
        first, *rest = converter.target_patterns
        return [renamed, *(renamed.replace(first, other) for other in rest)]

    def module_of(self, name: TensorName, modules: Mapping[str, nn.Module]) -> str | None:
        """Return the path of the experts module that a name belongs to, None if there is none."""
        if name.block not in self._blocks:
            self._blocks[name.block] = self._find(name.block, modules)
        return self._blocks[name.block]

    def _find(self, block: str, modules: Mapping[str, nn.Module]) -> str | None:
        """Ask the family's own conversions, then the module tree, then the layer's number."""
        blocks = [block] if block.endswith("experts") else [block, f"{block}.experts"]
        for candidate in blocks:
            for probe in _PROBES:
                path = self.rename(probe.format(candidate))[0].rpartition(".")[0]
                if path in modules:
                    return path
            for path in (candidate, f"{self._prefix}.{candidate}"):
                if path in modules:
                    return path
        same_layer = [path for path in modules if _in_same_layer(block, path)]
        return same_layer[0] if len(same_layer) == 1 else None


def _in_same_layer(block: str, path: str) -> bool:
    """Say whether two names lie in the layer of the same number of the same stack."""
    left, right = _layer(block), _layer(path)
    return left is not None and left == right


def _layer(name: str) -> tuple[str, str] | None:
    """Return the word before the last number of a name, and the number."""
    found = re.findall(r"(?:^|\.)(\w+)\.(\d+)(?=\.|$)", name)
    return found[-1] if found else None
