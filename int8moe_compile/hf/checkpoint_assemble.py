"""Build the tensors of an experts module from those of a checkpoint, in our layout.

Shapes: codes [E,N,H] and [E,H,I], scales as the operator takes them. ``fetch`` returns a tensor of
the checkpoint by name and is asked for each one once, so that it can free or load what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint_pack import unpack_codes
from ..ops.quantize import quantize_weight
from ..passes.layouts import Which, from_hf_bias, from_hf_layout
from ..schemes import INT8_STATIC_TENSOR, Scheme
from ..structure import ExpertsStructure, Layout
from .checkpoint_sources import WeightSources

Fetch = Callable[[str], Tensor]


class ExpertsBuffer:
    """Collect the experts of one weight, with no more than one of them beside the result."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.codes: Tensor | None = None

    def put(self, index: int, first_row: int, codes: Tensor, rows: int) -> None:
        """Copy some rows of one expert; ``rows`` is how many the whole expert has."""
        if self.codes is None:
            shape = (self.experts, rows, codes.shape[-1])
            self.codes = torch.empty(shape, dtype=codes.dtype, device=codes.device)
        self.codes[index, first_row : first_row + codes.shape[0]] = codes

    def result(self) -> Tensor:
        """Return what was collected."""
        assert self.codes is not None, "a weight without experts passed the checks"
        return self.codes


def assemble_codes(sources: WeightSources, fetch: Fetch) -> Tensor:
    """Return the int8 codes of one weight in our layout."""
    need, layout = sources.need, sources.need.structure.layout
    if sources.is_fused:
        parts = [_fused_codes(sources, projection, fetch) for projection in sources.projections]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    rows = sum(need.size(projection)[0] for projection in sources.projections)
    buffer = ExpertsBuffer(need.experts)
    for expert in sources.experts:
        assert expert is not None, "a weight that is not fused has numbered experts"
        first_row = 0
        for projection in sources.projections:
            codes = _codes(sources, projection, expert, fetch)
            if projection == "gate_up":
                codes = from_hf_layout(codes[None], replace(layout, transposed=False), "w13")[0]
            buffer.put(expert, first_row, codes, rows)
            first_row += codes.shape[0]
    return buffer.result()


def _codes(sources: WeightSources, projection: str, expert: int | None, fetch: Fetch) -> Tensor:
    """Return the codes of one tensor, unpacked."""
    packed = sources.key(projection, expert, "packed")
    if packed is not None:
        return unpack_codes(fetch(packed), sources.need.size(projection)[1])
    along_inputs = sources.key(projection, expert, "qweight")
    if along_inputs is not None:
        return unpack_codes(fetch(along_inputs).t(), sources.need.size(projection)[1])
    key = sources.key(projection, expert, "weight")
    assert key is not None, "sources without codes passed the checks"
    return fetch(key)


def _fused_codes(sources: WeightSources, projection: str, fetch: Fetch) -> Tensor:
    """Return one projection of all experts in our layout."""
    layout = sources.need.structure.layout
    if sources.key(projection, None, "packed") is not None:
        layout = replace(layout, transposed=False)
    codes = _codes(sources, projection, None, fetch)
    if projection != "gate_up":
        layout = replace(layout, interleaved=False)
    return from_hf_layout(codes, layout, sources.which).contiguous()


def assemble_scale(sources: WeightSources, scheme: Scheme, fetch: Fetch) -> Tensor:
    """Return the weight scale, fp32: [E,rows] per channel, [E,1] or [E,2] (gate, up) per tensor."""
    parts = []
    for projection in sources.projections:
        values = [
            fetch(key).to(torch.float32)
            for expert in sources.experts
            for word in ("scale", "scales")
            if (key := sources.key(projection, expert, word)) is not None
        ]
        part = torch.stack([value.flatten() for value in values])
        if sources.is_fused:
            part = part.expand(sources.need.experts, 1) if part.numel() == 1 else part
            part = part.reshape(sources.need.experts, -1)
        if projection == "gate_up" and part.shape[1] > 2:
            part = from_hf_bias(part, sources.need.structure.layout, "w13")
        parts.append(part)
    scale = torch.cat(parts, dim=1)
    gated = sources.which == "w13" and sources.need.structure.gate.gated
    if scheme.weight_key == INT8_STATIC_TENSOR and gated and scale.shape[1] == 1:
        scale = scale.expand(-1, 2)
    return scale.contiguous()


def assemble_input_scale(sources: WeightSources, fetch: Fetch) -> Tensor:
    """Return the static scale of the activations, fp32 [1]: the largest of all that there are."""
    values = [
        fetch(key).to(torch.float32).flatten()
        for projection in sources.projections
        for expert in sources.experts
        if (key := sources.key(projection, expert, "input_scale")) is not None
    ]
    return torch.cat(values).amax().reshape(1)


def assemble_bias(sources: WeightSources, fetch: Fetch, dtype: torch.dtype) -> Tensor:
    """Return the bias [E,rows] in our layout."""
    parts = []
    for projection in sources.projections:
        keys = [sources.key(projection, expert, "bias") for expert in sources.experts]
        values = [fetch(key) for key in keys if key is not None]
        part = values[0] if sources.is_fused else torch.stack(values)
        if projection == "gate_up":
            part = from_hf_bias(part, sources.need.structure.layout, "w13")
        parts.append(part)
    return torch.cat(parts, dim=1).to(dtype)


def quantise_experts(
    experts: Sequence[Callable[[], Tensor]],
    structure: ExpertsStructure,
    which: Which,
    scheme: Scheme,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise a float weight expert by expert, as quantize_ does; return codes and scale.

    experts: functions that return one expert each, in a given layout (the module's by default).
    Raises ValueError for values that are not finite.
    """
    granularity = "channel"
    if scheme.weight_key == INT8_STATIC_TENSOR:
        granularity = "halves" if which == "w13" and structure.gate.gated else "tensor"
    buffer = ExpertsBuffer(len(experts))
    scales = []
    for index, load in enumerate(experts):
        ours = from_hf_layout(load()[None], layout or structure.layout, which)
        codes, scale = quantize_weight(ours, granularity)
        buffer.put(index, 0, codes[0], codes.shape[1])
        scales.append(scale)
    return buffer.result(), torch.cat(scales)
