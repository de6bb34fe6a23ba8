"""Plan the load of an INT8 checkpoint: which tensor goes where; refuse all that does not fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist

from ..checkpoint_config import CheckpointConfig
from ..checkpoint_files import TensorEntry, is_dense
from ..checkpoint_names import parse_name, split_linear
from ..errors import CheckpointError
from ..schemes import Scheme
from ..structure import ExpertsStructure, Gate, Layout
from .checkpoint_assemble import (
    Fetch,
    assemble_bias,
    assemble_codes,
    assemble_input_scale,
    assemble_scale,
)
from .checkpoint_gptq import gptq_source
from .checkpoint_judge import Verdict, judge, need_of, record_for
from .checkpoint_linear import LinearSource, linear_source
from .checkpoint_mixed import mixed_builders
from .checkpoint_resolve import Names
from .checkpoint_sources import FLOATS, Checker, Piece, WeightSources
from .checkpoint_transforms import Routes
from .discovery import find_experts, weight_names
from .record import ExpertsRecord
from .view import BIAS, INPUT_SCALE, SCALE

log = logging.getLogger(__name__)

# What float experts have no use for.
UNUSED_PARTS: Final = ("input_scale", "input_zero_point", "shape")


@dataclass
class LoadPlan:
    """Collect what a load will do.

    records: of the modules that will be int8. reasons: of those that could not be, and are float;
    skipped: of those that a user left out. sources: of all int8 weights, for the checks of values.
    linears: what becomes float again; dequantised: the modules that it belongs to. blocks: the
    names up to the experts of what is planned.
    """

    routes: Routes = field(default_factory=Routes)
    records: dict[str, ExpertsRecord] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    sources: list[WeightSources] = field(default_factory=list)
    linears: list[LinearSource] = field(default_factory=list)
    dequantised: list[str] = field(default_factory=list)
    blocks: set[str] = field(default_factory=set)


class Planner:
    """Make the plan for one model and one checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        names: Names,
        entries: Mapping[str, TensorEntry],
        config: CheckpointConfig,
        directory: Path,
        device: torch.device,
        dequantize: bool = False,
    ) -> None:
        self.dequantize = dequantize
        self.modules = dict(find_experts(model))
        self.names = names
        self.entries = entries
        self.config = config
        self.directory = directory
        self.device = device
        self.plan = LoadPlan()
        self.pieces: dict[str, list[Piece]] = {path: [] for path in self.modules}
        self._judged: set[str] = set()

    def run(self) -> LoadPlan:
        """Plan experts first, then the linear layers that are quantised beside them."""
        self._sort_pieces()
        self._judged = {piece.key for pieces in self.pieces.values() for piece in pieces}
        for path, module in self.modules.items():
            verdict = judge(path, module, self.pieces[path], self.config)
            if verdict.is_quantised:
                self._plan_module(path, module, verdict)
            else:
                self._refuse_codes(path)
        self._plan_linears()
        self._plan_casts()
        return self.plan

    def _sort_pieces(self) -> None:
        """Give every tensor of routed experts to its module."""
        for key, entry in self.entries.items():
            name = parse_name(key)
            if name is None or is_dense(name, self.entries):
                continue
            path = self.names.module_of(name, self.modules)
            if path is not None:
                self.pieces[path].append(Piece(key, entry, name))

    def _refuse_codes(self, path: str) -> None:
        """Refuse integer weights in a module that the configuration leaves out."""
        for piece in self.pieces[path]:
            if not piece.entry.dtype.is_floating_point or piece.name.part != "weight":
                if piece.name.part == "bias":
                    continue
                raise CheckpointError(
                    f"{piece.entry.file}: {piece.key}: quantization_config leaves {path} "
                    f"unquantised; wanted float weights alone, got {piece.name.part} of "
                    f"{piece.entry.dtype}"
                )

    def _plan_module(self, path: str, module: nn.Module, verdict: Verdict) -> None:
        """Plan one module as int8, or as float with the reason."""
        self.plan.blocks.update(piece.name.block for piece in self.pieces[path])
        reason = verdict.reason
        if self.dequantize:
            self.plan.skipped[path] = reason = "dequantised while loading, as asked for"
        elif verdict.scheme is not None:
            record = record_for(module, verdict.scheme, self.device)
            if isinstance(record, ExpertsRecord):
                self._plan_int8(path, module, record)
                return
            reason = record
        assert reason is not None, "a verdict without scheme has a reason"
        if not self.dequantize:
            self.plan.reasons[path] = reason
        dtype = getattr(module, weight_names(module)[0]).dtype
        structure = _float_structure(module)
        checker = Checker(need_of(path, module, structure), self.pieces[path], self.directory)
        for target, sources, builder in mixed_builders(checker, verdict, dtype):
            keys = tuple(key for source in sources for key in source.keys)
            self.plan.routes.add(target, keys, builder)
            self.plan.linears.extend(sources)
        for piece in self.pieces[path]:
            if piece.name.part in UNUSED_PARTS and piece.key not in self.plan.routes.targets:
                self.plan.routes.drop(target, piece.key)
        self.plan.dequantised.append(path)

    def _plan_int8(self, path: str, module: nn.Module, record: ExpertsRecord) -> None:
        """Plan both weights, their scales and biases of one module."""
        need = need_of(path, module, record.structure)
        checker = Checker(need, self.pieces[path], self.directory)
        for sources in checker.int8(record.scheme):
            self._refuse_reordered(sources)
            target = need.target(sources.which)
            biases = tuple(key for what, key in sources.keys.items() if what[2] == "bias")
            others = tuple(key for what, key in sources.keys.items() if what[2] != "bias")
            self.plan.routes.add(target, others, Int8Builder(sources, record.scheme))
            if biases:
                dtype = getattr(module, target.rpartition(".")[2] + BIAS).dtype
                self.plan.routes.add(target + BIAS, biases, BiasBuilder(sources, dtype))
            self.plan.sources.append(sources)
        self.plan.records[path] = record

    def _refuse_reordered(self, sources: WeightSources) -> None:
        """Refuse fused codes of a family whose own converter would move their rows about."""
        for (_, expert, part), key in sources.keys.items():
            if expert is not None or part not in ("weight", "packed"):
                continue
            converter = self.names.rename(key.removesuffix("_packed"))[1]
            kinds = () if converter is None else converter.operations
            if not all(isinstance(kind, (MergeModulelist, Concatenate)) for kind in kinds):
                raise CheckpointError(
                    f"{self.entries[key].file}: {key}: this family reorders fused experts while "
                    "it loads them, which is not supported for int8 codes; single experts are"
                )

    def _plan_linears(self) -> None:
        """Plan the dequantisation of every quantised layer that is no routed expert."""
        groups: dict[str, dict[str, str]] = {}
        for key in self.entries:
            found = split_linear(key)
            if found is not None and key not in self.plan.routes.targets:
                groups.setdefault(found[0], {})[found[1]] = key
        by_target: dict[str, list[tuple[str, LinearSource]]] = {}
        for weight, parts in groups.items():
            if any(key in self._judged for key in parts.values()):
                continue
            target = self.names.rename(weight)[0]
            if target not in self.names.state:
                continue  # belongs to no part of this model; the loader reports it
            if weight in self.entries:
                parts["weight"] = weight
            source = self._linear(weight, target, parts)
            by_target.setdefault(target, []).append((weight, source))
        for target, found_sources in by_target.items():
            sources = dict(found_sources)
            dtype = self.names.dtype_of(target)
            keys = [key for source in sources.values() for key in source.keys]
            keys += [key for weight in sources for key in groups[weight].values()]
            builder = LinearBuilder(target, sources, dtype, self.names)
            self.plan.routes.add(target, tuple(dict.fromkeys(keys)), builder)
            self.plan.linears.extend(sources.values())
            if target.rpartition(".")[0] not in self.plan.dequantised:
                self.plan.dequantised.append(target.rpartition(".")[0])

    def _plan_casts(self) -> None:
        """Plan float tensors that transformers would leave in the dtype of the file.

        It does so for every renamed tensor of a quantised checkpoint, whatever dtype was asked for.
        """
        groups: dict[str, list[str]] = {}
        for key, entry in self.entries.items():
            target, converter, _ = self.names.rename(key)
            reference = self.names.state.get(target)
            renamed = converter is not None or target != key
            if reference is None or key in self.plan.routes.targets or not renamed:
                continue
            if reference.dtype.is_floating_point and entry.dtype in FLOATS:
                groups.setdefault(target, []).append(key)
        for target, keys in groups.items():
            wanted = self.names.dtype_of(target)
            if any(self.entries[key].dtype != wanted for key in keys):
                sources = {key: LinearSource(key, 0, 0) for key in keys}
                builder = LinearBuilder(target, sources, wanted, self.names)
                self.plan.routes.add(target, tuple(keys), builder)

    def _linear(self, weight: str, target: str, parts: Mapping[str, str]) -> LinearSource:
        """Check one quantised linear layer."""
        module = weight.rpartition(".")[0]
        keys = self.config.keys_of([module, target.rpartition(".")[0]])
        bits = 8 if keys is None or keys.weight_key is None else keys.weight_key.bits
        size = tuple(self.names.state[target].shape)
        if self.names.rename(weight)[1] is not None or len(size) > 2:
            # One of several that are merged; its own size is that of its tensors.
            key = parts.get("weight")
            if key is None:
                raise CheckpointError(
                    f"{self.directory}: {module}: packed weights that {target} merges are not "
                    "supported"
                )
            size = self.entries[key].shape
        if "qweight" in parts:
            zero = self.config.packed_zero
            return gptq_source(parts, self.entries, size, bits, zero, self.directory)
        return linear_source(parts, self.entries, size, bits, self.directory)


def _float_structure(module: nn.Module) -> ExpertsStructure:
    """Return the structure of a module whose gate does not matter."""
    from .checkpoint_judge import structure_of
    from .gates import UnknownGateError

    try:
        return structure_of(module)[0]
    except UnknownGateError:
        w13_name, w2_name = weight_names(module)
        layout = Layout(bool(module.is_transposed), False, bool(module.has_bias))
        return ExpertsStructure(Gate(gated=bool(module.has_gate)), layout, w13_name, w2_name)


@dataclass(frozen=True)
class Int8Builder:
    """Build codes and scales of one weight."""

    sources: WeightSources
    scheme: Scheme

    def __call__(self, fetch: Fetch) -> dict[str, Tensor]:
        """Return codes, scale and, for static schemes, the activations' scale."""
        sources = self.sources
        target = sources.need.target(sources.which)
        codes = assemble_codes(sources, fetch)
        built = {target: codes, target + SCALE: assemble_scale(sources, self.scheme, fetch)}
        if self.scheme.activation_quant == "static":
            built[target + INPUT_SCALE] = assemble_input_scale(sources, fetch)
        return built


@dataclass(frozen=True)
class BiasBuilder:
    """Build one bias in our layout."""

    sources: WeightSources
    dtype: torch.dtype

    def __call__(self, fetch: Fetch) -> dict[str, Tensor]:
        """Return the bias."""
        target = self.sources.need.target(self.sources.which) + BIAS
        return {target: assemble_bias(self.sources, fetch, self.dtype)}


@dataclass(frozen=True)
class LinearBuilder:
    """Dequantise the weights that make one parameter, and merge them as the family does."""

    target: str
    sources: Mapping[str, LinearSource]
    dtype: torch.dtype
    names: Names

    def __call__(self, fetch: Fetch) -> dict[str, Any]:
        """Return the float parameter, or the several that a converter makes."""
        from copy import deepcopy

        values = {key: source.read(fetch, self.dtype) for key, source in self.sources.items()}
        converter = self.names.rename(next(iter(values)))[1]
        if converter is None:
            return {self.target: next(iter(values.values()))}
        fresh: Any = deepcopy(converter)
        for key, value in values.items():
            fresh.add_tensor(self.target, key, self.names.rename(key)[2], value)
        model = self.names.model
        return dict(fresh.convert(self.target, model=model, config=model.config))
