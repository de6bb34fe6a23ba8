"""Read linear layers that GPTQ packed, to make them float again.

K inputs, N outputs, G groups of inputs. qweight [K/p,N] and qzeros [G,N/p] hold p unsigned values
in an int32 word, scales are [G,N], g_idx [K] is the group of each input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..checkpoint_config import PACKED_ZEROS
from ..checkpoint_files import TensorEntry
from ..checkpoint_names import place
from ..errors import CheckpointError
from .checkpoint_linear import LinearSource
from .checkpoint_sources import FLOATS

# Bits -> a word with 1 in each of its values; the older format stores zero points less 1.
_ONES: Final = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class GptqSource(LinearSource):
    """Name the tensors of one layer; zero_point is qzeros, stored less ``missing``."""

    g_idx: str | None = None
    missing: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the names of the tensors that are read."""
        return (*super().keys, *filter(None, [self.g_idx]))

    def read(self, fetch: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
        """Return the weight [N,K], multiplied out in fp32 and rounded once to dtype."""
        assert self.scale is not None and self.zero_point is not None, "checked before the load"
        codes = _unpacked(fetch(self.weight).t(), self.bits)[:, : self.columns]
        zeros = _unpacked(fetch(self.zero_point) + self.missing, self.bits)[:, : self.rows].t()
        scales = fetch(self.scale).to(torch.float32).t()
        if self.g_idx is None:
            size = -(-self.columns // scales.shape[1])
            groups = torch.arange(self.columns, device=codes.device) // size
        else:
            groups = fetch(self.g_idx).long()
            least, most, count = int(groups.min()), int(groups.max()), scales.shape[1]
            if least < 0 or most >= count:
                raise CheckpointError(
                    f"{place(self.g_idx)}: wanted groups from 0 to {count - 1}, got "
                    f"{least if least < 0 else most}"
                )
        return ((codes - zeros[:, groups]) * scales[:, groups]).to(dtype)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned values of int32 words [R,W] as int32 [R, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def gptq_source(
    parts: Mapping[str, str],
    entries: Mapping[str, TensorEntry],
    size: tuple[int, ...],
    bits: int,
    packed_zero: int,
    directory: Path,
) -> GptqSource:
    """Check the tensors of one layer and return how to read them; raises CheckpointError."""
    example = next(iter(parts.values()))
    if len(size) != 2:
        raise CheckpointError(f"{directory}: {example}: wanted a matrix, got {list(size)}")
    rows, columns = size
    if bits not in _ONES:
        raise CheckpointError(f"{directory}: {example}: wanted 2, 4 or 8 bits, got {bits}")
    for part in ("qweight", "qzeros", "scales"):
        if part not in parts:
            raise CheckpointError(
                f"{directory}: {example}: wanted {part} of the same layer, got none"
            )
    groups = (entries[parts["scales"]].shape or (0,))[0]
    wanted: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {
        "qweight": ((torch.int32,), (-(-columns * bits // 32), rows)),
        "qzeros": ((torch.int32,), (groups, -(-rows * bits // 32))),
        "scales": (FLOATS, (groups, rows)),
        "g_idx": ((torch.int32, torch.int64), (columns,)),
    }
    for part, key in parts.items():
        dtypes, shape = wanted.get(part, ((), ()))
        entry = entries[key]
        if entry.dtype not in dtypes or entry.shape != shape or groups < 1:
            words = " or ".join(str(dtype) for dtype in dtypes) or "no such tensor"
            raise CheckpointError(
                f"{entry.file}: {place(key)}: wanted {words} {list(shape)}, got {entry.dtype} "
                f"{list(entry.shape)}"
            )
    missing = _ONES[bits] if packed_zero == PACKED_ZEROS["gptq"] else 0
    return GptqSource(
        parts["qweight"],
        rows,
        columns,
        parts["scales"],
        parts["qzeros"],
        bits=bits,
        g_idx=parts.get("g_idx"),
        missing=missing,
    )
