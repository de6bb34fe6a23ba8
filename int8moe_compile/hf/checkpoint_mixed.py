"""Make the experts of a module float again, where not all of it can run as int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..passes.layouts import Which, interleave, to_hf_layout
from .checkpoint_assemble import ExpertsBuffer, Fetch
from .checkpoint_gptq import gptq_source
from .checkpoint_judge import Verdict
from .checkpoint_linear import LinearSource, linear_source
from .checkpoint_sources import Checker, Need


@dataclass(frozen=True)
class MixedBuilder:
    """Build one float weight of a module from quantised and unquantised projections."""

    need: Need
    which: Which
    experts: tuple[tuple[LinearSource, ...], ...]
    dtype: torch.dtype

    def __call__(self, fetch: Fetch) -> dict[str, Tensor]:
        """Return the weight in the layout of the module's own code."""
        buffer = ExpertsBuffer(self.need.experts)
        for index, sources in enumerate(self.experts):
            rows = torch.cat([source.read(fetch, self.dtype) for source in sources])
            buffer.put(index, 0, rows, rows.shape[0])
        layout = self.need.structure.layout
        weight = to_hf_layout(buffer.result(), layout, self.which).contiguous()
        return {self.need.target(self.which): weight}


@dataclass(frozen=True)
class _MixedBias:
    """Build one bias in the layout of the module's own code."""

    need: Need
    which: Which
    keys: tuple[tuple[str, ...], ...]
    dtype: torch.dtype

    def __call__(self, fetch: Fetch) -> dict[str, Tensor]:
        """Return the bias [E, rows]."""
        bias = torch.stack([torch.cat([fetch(key) for key in keys]) for keys in self.keys])
        if self.which == "w13" and self.need.structure.layout.interleaved:
            bias = interleave(bias)
        return {self.need.target(self.which) + "_bias": bias.to(self.dtype)}


def mixed_builders(
    checker: Checker, verdict: Verdict, dtype: torch.dtype
) -> Iterator[tuple[str, list[LinearSource], MixedBuilder | _MixedBias]]:
    """Yield target, sources and builder of every weight and bias of a module."""
    need = checker.need
    whiches: tuple[Which, ...] = ("w13", "w2")
    for which in whiches:
        projections, experts = checker.layout_of(which)
        if experts == (None,):
            raise CheckpointError(
                f"{checker.directory}: {need.path}: {verdict.reason}; fused tensors of such a "
                "module cannot be made float again"
            )
        rows = tuple(
            tuple(_source(checker, verdict, projection, expert) for projection in projections)
            for expert in range(need.experts)
        )
        flat = [source for sources in rows for source in sources]
        yield need.target(which), flat, MixedBuilder(need, which, rows, dtype)
        if need.structure.layout.has_bias:
            biases = tuple(
                tuple(_key(checker, projection, expert, "bias") for projection in projections)
                for expert in range(need.experts)
            )
            sources = [LinearSource(key, 1, 1) for keys in biases for key in keys]
            yield f"{need.target(which)}_bias", sources, _MixedBias(need, which, biases, dtype)


def _key(checker: Checker, projection: str, expert: int, part: str) -> str:
    """Return the name of a tensor that has to be there."""
    piece = checker.pieces.get((projection, expert, part))
    if piece is None:
        raise CheckpointError(checker.missing(projection, expert, part))
    return piece.key


def _source(checker: Checker, verdict: Verdict, projection: str, expert: int) -> LinearSource:
    """Return how to read one projection of one expert."""
    found = {
        piece.name.part: piece
        for what, piece in checker.pieces.items()
        if what[:2] == (projection, expert) and what[2] != "bias"
    }
    keys = verdict.keys.get((projection, expert))
    if keys is None:
        if set(found) != {"weight"}:
            raise CheckpointError(
                f"{checker.directory}: {checker.need.path}: expert {expert}, {projection}: "
                f"quantization_config leaves it unquantised; wanted its weight alone, got "
                f"{sorted(found)}"
            )
    elif not {"scale", "scales"} & set(found):
        raise CheckpointError(checker.missing(projection, expert, "scale"))
    parts = {part: piece.key for part, piece in found.items()}
    entries = {piece.key: piece.entry for piece in found.values()}
    bits = 8 if keys is None or keys.weight_key is None else keys.weight_key.bits
    size = checker.need.size(projection)
    if not parts:
        raise CheckpointError(checker.missing(projection, expert, "weight"))
    if "qweight" in parts:
        zero = verdict.packed_zero
        return gptq_source(parts, entries, size, bits, zero, checker.directory)
    source = linear_source(parts, entries, size, bits, checker.directory)
    return source if keys is not None else replace(source, scale=None)
