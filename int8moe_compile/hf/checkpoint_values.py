"""Check the values of scales and zero points, and that nothing else is missing or misshapen."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint_files import TensorEntry, TensorReader
from ..checkpoint_names import layer_of, place
from ..errors import CheckpointError
from .checkpoint_linear import LinearSource
from .checkpoint_resolve import Names
from .checkpoint_sources import WeightSources

_UNCHECKED = ("weight", "packed", "qweight", "bias")


def check_values(
    sources: Iterable[WeightSources],
    linears: Iterable[LinearSource],
    entries: Mapping[str, TensorEntry],
    packed_zero: int,
) -> None:
    """Read every scale and zero point once; refuse, or warn where static scales differ."""
    static: dict[str, dict[str, list[float]]] = {}
    with TensorReader(entries) as reader:
        for weight in sources:
            for (projection, _, part), key in weight.keys.items():
                value = None if part in _UNCHECKED else reader.read(key)
                if value is not None and part == "qzeros":
                    # Unsigned bytes, one a row; as far apart from 0 as from what 0 is stored as.
                    value = value.view(torch.uint8).flatten().int() - packed_zero
                    value = value[: weight.need.size(projection)[0]]
                if value is not None:
                    _check(entries[key].file, key, part, value, weight.need.size(projection))
                if value is not None and part == "input_scale":
                    found = static.setdefault(weight.need.path, {})
                    found.setdefault(projection, []).extend(value.flatten().tolist())
        for linear in linears:
            if linear.scale is not None:
                value = reader.read(linear.scale)
                _check(entries[linear.scale].file, linear.scale, "scale", value, (0, 0))
    for path, by_projection in static.items():
        _warn_about_differences(path, by_projection)


def _check(file: Path, key: str, part: str, value: Tensor, size: tuple[int, int]) -> None:
    """Check the values of one small tensor."""
    if part in ("scale", "scales", "input_scale"):
        wrong = value[~(torch.isfinite(value) & (value > 0))].flatten()
        if wrong.numel():
            raise CheckpointError(
                f"{file}: {place(key)}: wanted positive finite scales, got {wrong[0].item()}"
            )
    elif part in ("zero_point", "input_zero_point", "qzeros"):
        wrong = value[value != 0].flatten()
        if wrong.numel():
            raise CheckpointError(
                f"{file}: {place(key)}: wanted zero points of 0 (symmetric codes), got "
                f"{wrong[0].item()}: asymmetric quantisation is not supported"
            )
    elif part == "g_idx" and value.any():
        raise CheckpointError(
            f"{file}: {place(key)}: wanted every input in group 0 (one scale per channel), got "
            f"{value.max().item()}"
        )
    elif part == "shape" and tuple(value.tolist())[-2:] != size:
        raise CheckpointError(f"{file}: {place(key)}: wanted {list(size)}, got {value.tolist()}")


def _warn_about_differences(path: str, by_projection: Mapping[str, list[float]]) -> None:
    """Warn once a module if tensors that meet the same activations disagree about their scale."""
    first = [by_projection[name] for name in ("gate", "up", "gate_up") if name in by_projection]
    for values in ([value for part in first for value in part], by_projection.get("down", [])):
        if len(set(values)) > 1:
            seen = {name: max(part) for name, part in by_projection.items()}
            warnings.warn(
                f"{path} (layer {layer_of(path)}): its static input scales differ (largest of "
                f"each projection: {seen}); the largest is used for the whole layer",
                UserWarning,
                stacklevel=2,
            )
            return


def check_rest(
    model: Any,
    names: Names,
    entries: Mapping[str, TensorEntry],
    planned: Mapping[str, str],
    blocks: Iterable[str],
    directory: Path,
    may_be_missing: Collection[str] = (),
) -> None:
    """Refuse missing, extra and misshapen tensors among those that transformers loads itself.

    What lies outside the base model (a new head, say) may be missing, as in transformers.
    """
    covered = set(planned.values())
    inside = tuple(f"{block}." for block in blocks)
    for key, entry in entries.items():
        if key in planned:
            continue
        target, converter, _ = names.rename(key)
        covered.update(names.targets(key))
        reference = names.state.get(target)
        if reference is None:
            if key.startswith(inside):
                raise CheckpointError(
                    f"{entry.file}: {place(key)}: extra: no parameter of the model takes it"
                )
        elif converter is None and (
            entry.shape != tuple(reference.shape)
            or entry.dtype.is_floating_point != reference.dtype.is_floating_point
        ):
            raise CheckpointError(
                f"{entry.file}: {place(key)}: wanted {reference.dtype} {list(reference.shape)}, "
                f"got {entry.dtype} {list(entry.shape)}"
            )
    optional = [re.compile(text) for text in model._keys_to_ignore_on_load_missing or ()]
    base = f"{model.base_model_prefix}."
    has_base = any(name.startswith(base) for name in names.state)
    for name in names.state:
        if name in covered or name in may_be_missing or name in model.all_tied_weights_keys:
            continue
        if any(pattern.search(name) for pattern in optional):
            continue
        if name.startswith(base) or not has_base:
            raise CheckpointError(f"{directory}: wanted tensor {name}, got none")
