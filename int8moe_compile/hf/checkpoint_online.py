"""Plan a load that quantises float experts on the way in, one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
)

from ..checkpoint_files import TensorEntry
from ..checkpoint_names import place
from ..errors import CheckpointError
from ..passes.layouts import Which, from_hf_bias
from ..schemes import parse_scheme
from ..structure import Layout
from .checkpoint_assemble import quantise_experts
from .checkpoint_judge import record_for
from .checkpoint_plan import LoadPlan
from .checkpoint_resolve import Names
from .checkpoint_transforms import Fetch
from .checkpoint_values import check_rest
from .config import Int8MoeConfig
from .discovery import find_experts
from .record import ExpertsRecord
from .unsupported import find_unsupported, reason_unsupported
from .view import BIAS, SCALE


@dataclass(frozen=True)
class _Goal:
    """Name one weight that is to be quantised while it is loaded."""

    path: str
    which: Which
    record: ExpertsRecord
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Float:
    """Hold one float tensor of the checkpoint: its name and the pattern of a converter."""

    key: str
    pattern: str


def plan_online(
    model: Any,
    names: Names,
    entries: Mapping[str, TensorEntry],
    config: Int8MoeConfig,
    directory: Path,
    device: torch.device,
) -> LoadPlan:
    """Plan the quantisation of every experts module that can be quantised; keep the reasons.

    Raises ValueError for a model without any experts, CheckpointError for tensors that do not fit.
    """
    plan = LoadPlan()
    plan.routes.entries = entries
    goals: dict[str, _Goal] = {}
    scheme = parse_scheme(config.scheme)
    found, others = list(find_experts(model)), list(find_unsupported(model))
    if not found and not others:
        raise ValueError(
            f"model: wanted one with experts modules of transformers, got {type(model).__name__} "
            "without any"
        )
    for path, module in others:
        refused = plan.reasons if config.skips(path) is None else plan.skipped
        refused[path] = reason_unsupported(module)
    for path, module in found:
        pattern = config.skips(path)
        if pattern is not None:
            plan.skipped[path] = f"skipped: its name matches {pattern!r}"
            continue
        record = record_for(module, scheme, device)
        if isinstance(record, str):
            plan.reasons[path] = record
            continue
        plan.records[path] = record
        structure = record.structure
        weights: tuple[tuple[Which, str], ...] = (
            ("w13", structure.w13_name),
            ("w2", structure.w2_name),
        )
        for which, name in weights:
            shape = tuple(getattr(module, name).shape)
            goals[f"{path}.{name}"] = _Goal(path, which, record, shape)
    _route(plan, names, entries, goals, directory)
    # A float checkpoint may lack what a new head needs, as everywhere in transformers.
    optional = set(names.state) - set(goals)
    check_rest(model, names, entries, plan.routes.targets, (), directory, optional)
    return plan


def _route(
    plan: LoadPlan,
    names: Names,
    entries: Mapping[str, TensorEntry],
    goals: Mapping[str, _Goal],
    directory: Path,
) -> None:
    """Send the tensors of every goal to a builder."""
    groups: dict[str, list[_Float]] = {}
    converters: dict[str, WeightConverter | None] = {}
    made: set[str] = set()
    for key in sorted(entries, key=dot_natural_key):
        first, converter, pattern = names.rename(key)
        targets = names.targets(key)
        if any(target in goals for target in targets):
            if not entries[key].dtype.is_floating_point:
                raise CheckpointError(
                    f"{entries[key].file}: {place(key)}: wanted floating point, got "
                    f"{entries[key].dtype}"
                )
            goal = goals.get(first)
            if converter is None and goal is not None and entries[key].shape != goal.shape:
                raise CheckpointError(
                    f"{entries[key].file}: {place(key)}: wanted shape {list(goal.shape)}, got "
                    f"{list(entries[key].shape)}"
                )
            groups.setdefault(first, []).append(_Float(key, pattern))
            converters[first] = converter
            made.update(targets)
        elif first.endswith(BIAS) and first.removesuffix(BIAS) in goals:
            goal = goals[first.removesuffix(BIAS)]
            if converter is None and goal.record.structure.layout.interleaved:
                builder = _BiasBuilder(first, key, goal)
                plan.routes.add(first, (key,), builder)
    for target in goals:
        if target not in made:
            raise CheckpointError(f"{directory}: wanted tensors for {target}, got none")
    for first, floats in groups.items():
        keys = tuple(item.key for item in floats)
        builder_ = OnlineBuilder(first, tuple(floats), converters[first], goals, names)
        plan.routes.add(first, keys, builder_)


@dataclass(frozen=True)
class _BiasBuilder:
    """Bring one bias into our layout."""

    target: str
    key: str
    goal: _Goal

    def __call__(self, fetch: Fetch) -> dict[str, Tensor]:
        """Return the bias."""
        layout = self.goal.record.structure.layout
        return {self.target: from_hf_bias(fetch(self.key), layout, self.goal.which)}


@dataclass(frozen=True)
class OnlineBuilder:
    """Quantise what one target of the loader makes: one weight, seldom several."""

    target: str
    floats: tuple[_Float, ...]
    converter: WeightConverter | None
    goals: Mapping[str, _Goal]
    names: Names

    def __call__(self, fetch: Fetch) -> dict[str, Tensor]:
        """Return codes and scales."""
        goal = self.goals.get(self.target)
        if goal is not None and self.converter is None:
            (item,) = self.floats
            experts = [partial(fetch.rows, [(item.key, index)]) for index in range(goal.shape[0])]
            return self._quantised(self.target, goal, experts, None)
        if goal is not None and self.converter is not None and _stacks(self.converter, goal):
            return self._quantised(self.target, goal, self._experts(goal, fetch), Layout())
        built: dict[str, Tensor] = {}
        for target, tensor in self._converted(fetch).items():
            wanted = self.goals.get(target)
            if wanted is None:
                built[target] = tensor
                continue
            if tuple(tensor.shape) != wanted.shape:
                raise CheckpointError(
                    f"{target}: wanted shape {list(wanted.shape)}, got {list(tensor.shape)}"
                )
            experts = [partial(_itself, expert) for expert in tensor.unbind(0)]
            built |= self._quantised(target, wanted, experts, None)
        return built

    def _converted(self, fetch: Fetch) -> dict[str, Tensor]:
        """Run the family's own converter."""
        assert self.converter is not None, "without a converter a tensor is read as it is"
        fresh: Any = deepcopy(self.converter)
        for item in self.floats:
            fresh.add_tensor(self.target, item.key, item.pattern, fetch.unmapped(item.key))
        made = fresh.convert(self.target, model=self.names.model, config=self.names.model.config)
        return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}

    def _experts(self, goal: _Goal, fetch: Fetch) -> Sequence[Callable[[], Tensor]]:
        """Return functions that load one expert each, its projections one after the other."""
        assert self.converter is not None, "only a converter splits a weight by experts"
        split = [
            [item.key for item in self.floats if item.pattern == pattern]
            for pattern in self.converter.source_patterns
        ]
        for key in (key for keys in split for key in keys):
            self._check(key, goal, len(split), fetch)
        counts = {len(keys) for keys in split}
        if counts != {goal.shape[0]}:
            raise CheckpointError(
                f"{self.target}: wanted {goal.shape[0]} experts of each projection, got "
                f"{[len(keys) for keys in split]} (as {self.floats[0].key})"
            )

        return [
            partial(fetch.rows, [(keys[index], None) for keys in split])
            for index in range(goal.shape[0])
        ]

    def _check(self, key: str, goal: _Goal, parts: int, fetch: Fetch) -> None:
        """Check the shape of one projection of one expert."""
        entry = fetch.entries[key]
        wanted = (goal.shape[1] // parts, goal.shape[2])
        if entry.shape != wanted:
            raise CheckpointError(
                f"{entry.file}: {place(key)}: wanted shape {list(wanted)}, got {list(entry.shape)}"
            )

    def _quantised(
        self,
        target: str,
        goal: _Goal,
        experts: Sequence[Callable[[], Tensor]],
        layout: Layout | None,
    ) -> dict[str, Tensor]:
        """Quantise one weight."""
        record = goal.record
        try:
            codes, scale = quantise_experts(
                experts, record.structure, goal.which, record.scheme, layout
            )
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{target}: {error}") from error
        return {target: codes, target + SCALE: scale}


def _itself(expert: Tensor) -> Tensor:
    """Return an expert that is loaded already."""
    return expert


def _stacks(converter: WeightConverter, goal: _Goal) -> bool:
    """Say whether a converter does no more than stack experts, gate rows before up rows."""
    kinds = [
        (type(operation), getattr(operation, "dim", None)) for operation in converter.operations
    ]
    layout = goal.record.structure.layout
    stacked = [(MergeModulelist, 0), (Concatenate, 1)]
    plain = not layout.transposed and not layout.interleaved
    return plain and kinds == stacked[: 1 if len(converter.source_patterns) == 1 else 2]
