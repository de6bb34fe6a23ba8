"""Plan the conversion of a float checkpoint: which tensors become which, shard by shard."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from .checkpoint_families import family_refusal
from .checkpoint_files import INDEX, TensorEntry, read_headers, read_json, weight_files
from .checkpoint_names import TensorName, parse_name
from .checkpoint_write import quantization_config
from .errors import CheckpointError
from .ops.checks import FLOATS
from .schemes import INT8_STATIC_TENSOR, Scheme
from .skip import matching_pattern, warn_unmatched
from .structure import Layout

# How families whose checkpoints hold all experts in one tensor lay it out. Other such families
# reorder it while they load, which only their own code knows.
FUSED_LAYOUTS: Final[dict[str, Layout]] = {
    "gpt_oss": Layout(transposed=True, interleaved=True, has_bias=True),
    "openai_privacy_filter": Layout(transposed=True, has_bias=True),
    "gemma4": Layout(),
    "gemma4_text": Layout(),
    "granitemoe": Layout(),
    "granitemoe_swa": Layout(),
    "granitemoehybrid": Layout(),
    "granitemoeshared": Layout(),
    "hy_v4": Layout(),
    "mistral4": Layout(),
    "zaya": Layout(),
}


@dataclass(frozen=True)
class Output:
    """Describe a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """Turn one tensor of the source into the outputs: quantised, or copied where name is None."""

    key: str
    entry: TensorEntry
    outputs: tuple[Output, ...]
    name: TensorName | None = None


@dataclass(frozen=True)
class Conversion:
    """Hold everything about a conversion but the tensors themselves.

    shards: file name -> its steps. layout: of fused tensors. block names are those before
    ``.<expert>.`` or the projection of a fused tensor.
    """

    source: Path
    scheme: Scheme
    layout: Layout
    shards: Mapping[str, tuple[Step, ...]]
    config: dict[str, Any]

    @property
    def weight_map(self) -> dict[str, str]:
        """Return the file of every tensor to be written."""
        return {
            output.name: file
            for file, steps in self.shards.items()
            for step in steps
            for output in step.outputs
        }

    @property
    def is_sharded(self) -> bool:
        """Say whether the source has an index, so that the target needs one."""
        return (self.source / INDEX).is_file() or len(self.shards) > 1


def plan_conversion(source: Path, scheme: Scheme, skip: Sequence[str] = ()) -> Conversion:
    """Plan the conversion of a checkpoint directory from its headers alone.

    Raises CheckpointError: it is quantised already, it has no experts, experts that the package
    cannot run, or such as are fused in a layout that only the model's code knows.
    """
    config = read_json(source / "config.json")
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"{source / 'config.json'}: wanted a float checkpoint, got one with a "
            "quantization_config"
        )
    refusal = family_refusal(config)
    if refusal is not None:
        raise CheckpointError(f"{source / 'config.json'}: nothing to convert: {refusal}")
    entries = read_headers(weight_files(source))
    layout = FUSED_LAYOUTS.get(str(config.get("model_type")))
    shards: dict[str, list[Step]] = {}
    blocks: set[str] = set()
    for key, entry in entries.items():
        name = routed_weight(key, entry)
        if name is not None:
            blocks.add(name.block)
            if matching_pattern(name.block, skip) is not None:
                name = None
        step = Step(key, entry, (Output(key, entry.dtype, entry.shape),))
        if name is not None:
            if name.expert is None and layout is None:
                raise CheckpointError(
                    f"{entry.file}: {key}: the layout of fused experts is not known for "
                    f"model_type {config.get('model_type')!r}; load the model with "
                    "quantization_config=Int8MoeConfig(...) and save it instead"
                )
            step = Step(key, entry, _outputs(key, entry, name, scheme, layout or Layout()), name)
        shards.setdefault(entry.file.name, []).append(step)
    steps = [step for file in shards.values() for step in file]
    if not any(step.name is not None for step in steps):
        raise CheckpointError(f"{source}: wanted float weights of routed experts, got none")
    unused = [text for text in skip if not any(matching_pattern(b, [text]) for b in blocks)]
    warn_unmatched("skip", unused)
    config["quantization_config"] = _description(steps, scheme, skip)
    frozen = {file: tuple(found) for file, found in shards.items()}
    return Conversion(source, scheme, layout or Layout(), frozen, config)


def routed_weight(key: str, entry: TensorEntry) -> TensorName | None:
    """Return the name of a float weight of routed experts, None for any other tensor."""
    name = parse_name(key)
    if name is None or name.part != "weight" or entry.dtype not in FLOATS:
        return None
    dimensions = 3 if name.expert is None else 2
    return name if len(entry.shape) == dimensions else None


def _outputs(
    key: str, entry: TensorEntry, name: TensorName, scheme: Scheme, layout: Layout
) -> tuple[Output, ...]:
    """Describe the tensors that a quantised weight becomes."""
    *lead, rows, columns = entry.shape
    per_tensor = scheme.weight_key == INT8_STATIC_TENSOR
    if name.expert is None:
        if layout.transposed:
            rows, columns = columns, rows
        halves = 2 if name.projection == "gate_up" else 1
        shape = (*lead, halves) if per_tensor else (*lead, rows, 1)
        if layout.transposed and not per_tensor:
            shape = (*lead, 1, rows)
        codes = Output(key, torch.int8, entry.shape)
        return codes, Output(f"{key}_scale", torch.float32, shape)
    scale = Output(f"{key}_scale", torch.float32, (1,) if per_tensor else (rows, 1))
    if scheme.activation_key is not None:
        return Output(key, torch.int8, entry.shape), scale
    packed = Output(f"{key}_packed", torch.int32, (rows, -(-columns // 4)))
    return packed, scale, Output(f"{key}_shape", torch.int64, (2,))


def _description(steps: Sequence[Step], scheme: Scheme, skip: Sequence[str]) -> dict[str, Any]:
    """Return the ``quantization_config``: all that stays float is ignored by name."""
    ignore = []
    for step in steps:
        module, _, ending = step.key.rpartition(".")
        matrix = ending == "weight" and len(step.entry.shape) == 2 and step.name is None
        if matrix and "embed" not in module and parse_name(step.key) is None:
            ignore.append(module)
    blocks = {name.block for step in steps if (name := routed_weight(step.key, step.entry))}
    for block in sorted(blocks):
        if matching_pattern(block, skip) is not None:
            ignore.append(f"re:{re.escape(block)}\\..*")
    return quantization_config([(scheme, ["Linear"])], ignore)
