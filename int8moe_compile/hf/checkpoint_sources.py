"""Check the tensors that a checkpoint has for one experts module, strictly, from headers alone.

E experts, I intermediate, H hidden. A projection is "gate", "up", "down" or "gate_up"; a tensor
belongs to one expert, or holds all of them in a leading dimension (expert None).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ..checkpoint_files import TensorEntry
from ..checkpoint_names import PARTS, TensorName, layer_of, place
from ..errors import CheckpointError
from ..passes.layouts import Which
from ..schemes import Scheme
from ..structure import ExpertsStructure

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS: Final = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
WANTED_DTYPES: Final[dict[str, tuple[torch.dtype, ...]]] = {
    "weight": (torch.int8,),
    "packed": (torch.int32,),
    "scale": FLOATS,
    "input_scale": FLOATS,
    "zero_point": (*INTEGERS, *FLOATS),
    "input_zero_point": (*INTEGERS, *FLOATS),
    "shape": (torch.int64, torch.int32),
    "qweight": (torch.int32,),
    "scales": FLOATS,
    "qzeros": (torch.int32,),
    "g_idx": (torch.int32, torch.int64),
    "bias": FLOATS,
}
OPTIONAL: Final = ("zero_point", "input_zero_point", "g_idx")
# How the codes are stored -> the tensors that belong to them; the first that is there counts.
_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "weight": ("weight", "scale"),
    "packed": ("packed", "shape", "scale"),
    "qweight": ("qweight", "scales", "qzeros"),
}

# (projection, expert or None, part)
PieceId = tuple[str, int | None, str]


@dataclass(frozen=True)
class Piece:
    """Hold one tensor of a checkpoint and what its name means."""

    key: str
    entry: TensorEntry
    name: TensorName

    @property
    def id(self) -> PieceId:
        """Return what the tensor is within its module."""
        return self.name.projection, self.name.expert, self.name.part


@dataclass(frozen=True)
class Need:
    """State the sizes and the structure of the module that is to be filled."""

    path: str
    experts: int
    hidden: int
    intermediate: int
    structure: ExpertsStructure

    def projections(self, which: Which) -> tuple[str, ...]:
        """Return the projections that make up one weight."""
        if which == "w2":
            return ("down",)
        return ("gate", "up") if self.structure.gate.gated else ("up",)

    def size(self, projection: str) -> tuple[int, int]:
        """Return rows and columns of one expert's projection."""
        if projection == "down":
            return self.hidden, self.intermediate
        return self.intermediate * (2 if projection == "gate_up" else 1), self.hidden

    def target(self, which: Which) -> str:
        """Return the full name of the parameter."""
        names = self.structure.w13_name, self.structure.w2_name
        return f"{self.path}.{names[which == 'w2']}"


@dataclass(frozen=True)
class WeightSources:
    """List the checked tensors of one weight of one module; ``keys`` by what each is."""

    which: Which
    need: Need
    projections: tuple[str, ...]
    experts: tuple[int | None, ...]
    keys: Mapping[PieceId, str] = field(repr=False)

    @property
    def is_fused(self) -> bool:
        """Say whether one tensor holds all experts."""
        return self.experts == (None,)

    def key(self, projection: str, expert: int | None, part: str) -> str | None:
        """Return the name of one tensor, None if the checkpoint has none."""
        return self.keys.get((projection, expert, part))


class Checker:
    """Check one module's pieces; every refusal names file, tensor, wanted and got."""

    def __init__(self, need: Need, pieces: Sequence[Piece], directory: Path) -> None:
        self.need = need
        self.directory = directory
        self.pieces: dict[PieceId, Piece] = {}
        for piece in pieces:
            other = self.pieces.setdefault(piece.id, piece)
            if other is not piece:
                raise CheckpointError(
                    f"{piece.entry.file}: {place(piece.key)}: the same tensor is there as "
                    f"{other.key}, too"
                )
        self._used: set[PieceId] = set()

    def int8(self, scheme: Scheme) -> tuple[WeightSources, WeightSources]:
        """Return the sources of both weights of a module that is int8 throughout."""
        found = self._weight("w13", scheme), self._weight("w2", scheme)
        self.refuse_unused()
        return found

    def refuse_unused(self) -> None:
        """Refuse every tensor that belongs to nothing."""
        for name, piece in self.pieces.items():
            if name not in self._used:
                known = set(PARTS.values())
                what = "another tensor" if name[2] in known else f"no ending {name[2]!r}"
                raise CheckpointError(
                    f"{piece.entry.file}: {place(piece.key)}: wanted {what} or none here, got an "
                    f"extra one of {piece.entry.dtype} {list(piece.entry.shape)}"
                )

    def layout_of(self, which: Which) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
        """Find out how one weight is split: projections, and experts or (None,)."""
        wanted = self.need.projections(which)
        present = {(projection, expert) for projection, expert, _ in self.pieces}
        mine = (*wanted, "gate_up") if which == "w13" else wanted
        ours = {pair for pair in present if pair[0] in mine}
        projections = wanted
        if len(wanted) == 2 and any(projection == "gate_up" for projection, _ in ours):
            projections = ("gate_up",)
        fused = [expert for projection, expert in ours if projection in projections]
        experts: tuple[int | None, ...] = tuple(range(self.need.experts))
        if fused and all(expert is None for expert in fused):
            experts = (None,)
        return projections, experts

    def _weight(self, which: Which, scheme: Scheme) -> WeightSources:
        """Check one weight with its scales."""
        projections, experts = self.layout_of(which)
        keys: dict[PieceId, str] = {}
        for projection in projections:
            for expert in experts:
                for part in self._parts(projection, expert, scheme):
                    piece = self._take(projection, expert, part)
                    if piece is not None:
                        self._check_shape(piece, scheme)
                        keys[piece.id] = piece.key
        return WeightSources(which, self.need, projections, experts, keys)

    def _parts(self, projection: str, expert: int | None, scheme: Scheme) -> list[str]:
        """List the tensors that one projection needs or may have."""
        present = [part for what, at, part in self.pieces if (what, at) == (projection, expert)]
        kind = next((part for part in _KINDS if part in present), "weight")
        parts = list(_KINDS[kind])
        if scheme.activation_quant == "static":
            parts.append("input_scale")
        if self.need.structure.layout.has_bias:
            parts.append("bias")
        return [*parts, *(part for part in OPTIONAL if (part == "g_idx") == (kind == "qweight"))]

    def _take(self, projection: str, expert: int | None, part: str) -> Piece | None:
        """Return one tensor, its dtype checked; refuse if it is wanted and missing."""
        name = (projection, expert, part)
        piece = self.pieces.get(name)
        if piece is None:
            if part in OPTIONAL:
                return None
            raise CheckpointError(self.missing(projection, expert, part))
        self._used.add(name)
        wanted = WANTED_DTYPES[part]
        if piece.entry.dtype not in wanted:
            words = " or ".join(str(dtype) for dtype in wanted)
            raise CheckpointError(
                f"{piece.entry.file}: {place(piece.key)}: wanted {words}, got {piece.entry.dtype}"
            )
        return piece

    def missing(self, projection: str, expert: int | None, part: str) -> str:
        """Say that a tensor is missing, spelt like its neighbours."""
        where = "all experts" if expert is None else f"expert {expert}"
        like = [p for p in self.pieces.values() if p.name.part == part] or list(
            self.pieces.values()
        )
        alike = [p for p in like if p.name.projection == projection] or like
        example = f", as {alike[0].key} is there" if alike else ""
        return (
            f"{self.directory}: {self.need.path} (layer {layer_of(self.need.path)}, {where}, "
            f"{projection}): wanted its {part}, got none{example}"
        )

    def _check_shape(self, piece: Piece, scheme: Scheme) -> None:
        """Compare one tensor's shape with all that are right for it."""
        projection, expert, part = piece.id
        wanted = list(self._shapes(projection, part, expert is None, scheme))
        if piece.entry.shape not in wanted:
            words = " or ".join(str(list(shape)) for shape in dict.fromkeys(wanted))
            raise CheckpointError(
                f"{piece.entry.file}: {place(piece.key)}: wanted shape {words}, got "
                f"{list(piece.entry.shape)}"
            )

    def _shapes(
        self, projection: str, part: str, fused: bool, scheme: Scheme
    ) -> Iterable[tuple[int, ...]]:
        """List the shapes that one tensor may have."""
        rows, columns = self.need.size(projection)
        transposed = fused and self.need.structure.layout.transposed
        lead = (self.need.experts,) if fused else ()
        if part in ("weight", "packed"):
            width = columns if part == "weight" else -(-columns // 4)
            return [(*lead, width, rows) if transposed else (*lead, rows, width)]
        gptq: dict[str, tuple[int, ...]] = {
            "qweight": (-(-columns // 4), rows),
            "scales": (1, rows),
        }
        gptq |= {"qzeros": (1, -(-rows // 4)), "g_idx": (columns,)}
        if part in gptq:
            return [gptq[part]]
        if part == "shape":
            return [(2,), (3,)] if fused else [(2,)]
        if part == "bias":
            return [(*lead, rows)]
        values = [1] if part.startswith("input") else [_values(scheme, rows)]
        if fused and projection == "gate_up" and values == [1]:
            values.append(2)
        if part == "zero_point":
            values = [rows, 1, 2] if fused else [rows, 1]
        shapes = [(*lead, count) for count in values]
        # In a transposed weight [E,K,N], a scale [E,count,1] would lie along the inputs.
        shapes += [(*lead, 1, count) if transposed else (*lead, count, 1) for count in values]
        if 1 in values:
            shapes.append(lead)
            if fused:
                shapes.append((1, 1, 1))  # one for all experts
            if part.startswith("input"):
                shapes += [(), (1,), (1, 1)]
        return shapes


def _values(scheme: Scheme, rows: int) -> int:
    """Return how many scales a projection has."""
    return rows if scheme.weight_key.granularity == "channel" else 1
