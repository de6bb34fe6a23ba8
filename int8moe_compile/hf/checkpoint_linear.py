"""Quantised weights that have to become float again: layers outside the experts, mixed experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..checkpoint_files import TensorEntry
from ..checkpoint_names import GPTQ_PARTS, LINEAR_PARTS, place
from ..checkpoint_pack import unpack_codes
from ..errors import CheckpointError
from .checkpoint_sources import FLOATS

CODES: Final = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)

# What the weight of a layer may have beside it; inputs that were reordered (g_idx) are refused.
_PARTS: Final = {"weight", *LINEAR_PARTS.values()} - {*GPTQ_PARTS}


@dataclass(frozen=True)
class LinearSource:
    """Name the tensors of one weight [rows, columns]; scale None: it is float already.

    bits: of packed codes. A bias that was quantised, too, is one row.
    """

    weight: str
    rows: int
    columns: int
    scale: str | None = None
    zero_point: str | None = None
    packed: bool = False
    bits: int = 8

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the tensors that are read."""
        return tuple(key for key in (self.weight, self.scale, self.zero_point) if key is not None)

    def read(self, fetch: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
        """Return the weight, multiplied out in fp32 and rounded once to dtype."""
        codes = fetch(self.weight)
        if self.packed:
            codes = unpack_codes(codes, self.columns, self.bits)
        if self.scale is None:
            return codes.to(dtype)
        values = codes.to(torch.float32)
        if self.zero_point is not None:
            values = values - self._spread(fetch(self.zero_point).to(torch.float32))
        values = values * self._spread(fetch(self.scale).to(torch.float32))
        return values.reshape(codes.shape).to(dtype)

    def _spread(self, scale: Tensor) -> Tensor:
        """Return [rows or 1, columns or 1] from [], [1], [rows], [rows,1] or [rows,groups]."""
        if scale.numel() == 1:
            return scale.reshape(1, 1)
        if scale.dim() == 1:
            return scale.reshape(-1, 1)
        groups = scale.shape[1]
        return scale if groups == 1 else scale.repeat_interleave(self.columns // groups, dim=1)


def linear_source(
    parts: Mapping[str, str],
    entries: Mapping[str, TensorEntry],
    size: tuple[int, ...],
    bits: int,
    directory: Path,
) -> LinearSource:
    """Check the tensors of one quantised linear layer and return how to read them.

    size: of the weight, or of a bias. parts: part (see checkpoint_names) -> name of the tensor.
    Raises CheckpointError.
    """
    packed = "packed" in parts
    key = parts.get("packed") or parts.get("weight")
    example = next(iter(parts.values()))
    for part, name in parts.items():
        if part not in _PARTS:
            raise CheckpointError(
                f"{directory}: {name}: {part!r} of a quantised linear layer is not supported"
            )
    if key is None:
        raise CheckpointError(
            f"{directory}: {example}: wanted the weight of the same layer, got none"
        )
    entry = entries[key]
    if len(size) not in (1, 2) or (packed and len(size) == 1):
        raise CheckpointError(f"{entry.file}: {key}: wanted a matrix, got {list(size)}")
    rows, columns = (1, *size)[-2:]
    if packed and bits not in (2, 4, 8):
        raise CheckpointError(f"{entry.file}: {key}: wanted 2, 4 or 8 bits, got {bits}")
    width = -(-columns * bits // 32) if packed else columns
    wanted = (torch.int32,) if packed else CODES if "scale" in parts else FLOATS
    shape = (*size[:-1], width)
    if entry.dtype not in wanted or entry.shape != shape:
        words = " or ".join(str(dtype) for dtype in wanted)
        raise CheckpointError(
            f"{entry.file}: {place(key)}: wanted {words} {list(shape)}, got {entry.dtype} "
            f"{list(entry.shape)}"
        )
    if "scale" not in parts and packed:
        raise CheckpointError(f"{entry.file}: {place(key)}: wanted its scale, got none")
    if "scale" in parts:
        _check_scale(entries[parts["scale"]], parts["scale"], rows, columns)
    zero_point = parts.get("zero_point")
    if zero_point is not None and entries[zero_point].dtype == torch.int32 and packed:
        raise CheckpointError(f"{entry.file}: {zero_point}: packed zero points are not supported")
    return LinearSource(key, rows, columns, parts.get("scale"), zero_point, packed, bits)


def _check_scale(entry: TensorEntry, key: str, rows: int, columns: int) -> None:
    """Check dtype and shape of a scale."""
    shape = entry.shape
    grouped = len(shape) == 2 and shape[0] == rows and shape[1] > 0 and columns % shape[1] == 0
    fits = shape in ((), (1,), (1, 1), (rows,)) or grouped
    if not fits or entry.dtype not in FLOATS:
        raise CheckpointError(
            f"{entry.file}: {place(key)}: wanted a float scale [{rows}], [{rows}, 1] or [1], got "
            f"{entry.dtype} {list(shape)}"
        )
