"""Decide what an experts module will be before its weights are there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoint_config import CheckpointConfig, without_zero_points
from ..checkpoint_schemes import CheckpointKeys
from ..errors import CheckpointError
from ..passes.layouts import from_hf_layout
from ..schemes import Scheme
from ..structure import ExpertsStructure, Layout
from .checkpoint_sources import Need, Piece
from .discovery import weight_names
from .gates import UnknownGateError, recognise_gate
from .record import ExpertsRecord

_SPELLING = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "gate_up": "gate_up_proj"}


@dataclass(frozen=True)
class Verdict:
    """Hold what a checkpoint's configuration makes of one module.

    keys: of every projection that is quantised. scheme: None where the module becomes or stays
    float; reason then says why, if a quantised module was wanted at all. packed_zero: as in the
    configuration.
    """

    keys: dict[tuple[str, int | None], CheckpointKeys | None]
    scheme: Scheme | None
    reason: str | None = None
    packed_zero: int = 0

    @property
    def is_quantised(self) -> bool:
        """Say whether any projection is quantised."""
        return any(keys is not None for keys in self.keys.values())


def structure_of(module: nn.Module) -> tuple[ExpertsStructure, tuple[tuple[str, object], ...]]:
    """Return a module's structure and the attributes that decided it.

    Raises UnknownGateError. Works while modules are being built on the meta device.
    """
    w13_name, w2_name = weight_names(module)
    with torch.device("cpu"):
        found = recognise_gate(module)
    layout = Layout(bool(module.is_transposed), found.interleaved, bool(module.has_bias))
    return ExpertsStructure(found.gate, layout, w13_name, w2_name), found.reads


def need_of(path: str, module: nn.Module, structure: ExpertsStructure) -> Need:
    """Return the sizes that a module's own parameters have."""
    w2 = getattr(module, structure.w2_name)
    assert isinstance(w2, Tensor), "an experts module has its weights as tensors"
    experts, hidden, intermediate = from_hf_layout(w2, structure.layout, "w2").shape
    return Need(path, experts, hidden, intermediate, structure)


def record_for(module: nn.Module, scheme: Scheme, device: torch.device) -> ExpertsRecord | str:
    """Return the record that a module will carry, or why it cannot be quantised."""
    from ..quantization import oracle_refusal, shape_refusal

    try:
        structure, reads = structure_of(module)
    except UnknownGateError as error:
        return str(error)
    dtype = getattr(module, structure.w13_name).dtype
    record = ExpertsRecord(scheme, structure, dtype, reads)
    return shape_refusal(module, structure) or oracle_refusal(module, record, device) or record


def experts_of(module: nn.Module) -> int:
    """Return how many experts a module has."""
    count = module.num_experts
    assert isinstance(count, int), "an experts module knows its number of experts"
    return count


def judge(path: str, module: nn.Module, pieces: list[Piece], config: CheckpointConfig) -> Verdict:
    """Ask the configuration about every projection of a module.

    Raises CheckpointError, naming the module, for a scheme that cannot be run.
    """
    asked: dict[tuple[str, int | None], set[str]] = {}
    for piece in pieces:
        projection, expert, _ = piece.id
        spelt = _SPELLING[projection]
        names = asked.setdefault((projection, expert), set())
        names.add(piece.name.module)
        # A fused tensor goes by the names of the single projections in it, too.
        names.add(f"{path}.{0 if expert is None else expert}.{spelt}")
        names.add(f"{piece.name.block}.{0 if expert is None else expert}.{spelt}")
        if expert is None:
            names.add(f"{path}.{spelt}")
    if not asked:
        asked = {
            (which, expert): {f"{path}.{expert}.{_SPELLING[which]}"}
            for which in ("up", "down")
            for expert in range(experts_of(module))
        }
    class_name = type(module).__name__
    keys = {what: config.keys_of(sorted(names), class_name) for what, names in asked.items()}
    quantised = {value for value in keys.values() if value is not None}
    if not quantised:
        return Verdict(keys, None)
    if len(quantised) > 1:
        reason = "its projections are quantised in different ways"
        return Verdict(keys, None, reason, config.packed_zero)
    (only,) = quantised
    if only.weight_key is not None and only.reason is not None:
        # Whether the zero points really are 0 is checked with the values.
        only = without_zero_points(only)
    if only.scheme is None:
        raise CheckpointError(f"{path}: quantization_config: {only.reason}")
    if any(value is None for value in keys.values()):
        reason = "only some of its projections are quantised, the rest ignored"
        return Verdict(keys, None, reason, config.packed_zero)
    return Verdict(keys, only.scheme, None, config.packed_zero)
