"""Eager calls by the kernels of variants.py: the host that launches at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..ops.arguments import ExpertsArguments
from . import eager, launches, routing, tiles, variant_layers, variant_rows, variants

# What persistent programs are counted by where the number of multiprocessors is unknown.
FEW_MULTIPROCESSORS = 16


def has_assembly(device: torch.device) -> bool:
    """Say whether kernels are compiled for a device: Triton's interpreter knows no assembly."""
    return device.type == "cuda"


class EagerHost:
    """Make tensors and launch kernels on the current device."""

    def __init__(self, call: ExpertsArguments) -> None:
        self.call = call
        self.dtype = call.result_dtype
        self.device = call.hidden_states.device
        facts = eager.facts_of(self.device)
        is_few = variants.starts_early(call.topk_ids.numel(), facts)
        self.is_early = is_few and has_assembly(self.device)
        self.is_first = True

    def size(self, x: Tensor) -> list[int]:
        """Return a tensor's sizes."""
        return list(x.shape)

    def strides(self, x: Tensor) -> list[int]:
        """Return a tensor's strides."""
        return list(x.stride())

    def empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Return a new buffer."""
        return launches.empty(size, dtype, self.device)

    def contiguous(self, x: Tensor) -> Tensor:
        """Return a tensor without gaps."""
        return x.contiguous()

    def panels(self, x: Tensor, panels: int) -> Tensor:
        """Return a weight as [E * panels, N / panels, depth]."""
        return x.view(-1, x.shape[1] // panels, x.shape[2])

    def scale(self, x: Tensor) -> Tensor:
        """Return a weight scale as contiguous [E, columns]."""
        return (x.squeeze(-1) if x.dim() == 3 else x).contiguous()

    def descriptor(self, x: Tensor, block: list[int]) -> TensorDescriptor:
        """Return the descriptor of a tensor, read in blocks."""
        return TensorDescriptor.from_tensor(x, block)

    def options(self) -> dict[str, Any]:
        """Return the options of the next launch: the first starts when all others have ended."""
        if not self.is_early:
            return {}
        was_first, self.is_first = self.is_first, False
        return {"PDL": True, "launch_pdl": not was_first}

    def launch(self, kernel: Any, programs: int, arguments: dict[str, Any], tile: Any) -> None:
        """Launch a kernel now."""
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **self.options()}
        launches.launch(kernel, programs, **arguments, **options)

    def operate(self, operator: Any, *args: Any) -> None:
        """Call an operator now."""
        recording = launches.current_recording()
        known = 0 if recording is None else len(recording.launches)
        operator(*args)
        if recording is not None and len(recording.launches) == known:
            recording.refuse("an operator launches by itself")

    def is_old(self, *tensors: Tensor | None) -> bool:
        """Say that arguments are there: the first launch waits for what writes them."""
        return True

    def cdiv(self, a: int, b: int) -> int:
        """Return a / b, rounded up."""
        return tiles.ceil_div(a, b)

    def minimum(self, a: int, b: int) -> int:
        """Return the smaller size."""
        return min(a, b)

    def multiprocessors(self) -> int:
        """Return how many multiprocessors the device has."""
        return eager.facts_of(self.device).multiprocessors or FEW_MULTIPROCESSORS

    def code_arithmetic(self, x: Tensor) -> dict[str, bool]:
        """Say what the device has for codes beside x."""
        facts = eager.facts_of(self.device)
        is_packed = tiles.packs_codes(facts, x.element_size())
        return {
            "DOT4": has_assembly(self.device) and not tiles.is_rocm(facts),
            "PACKED": is_packed,
            "TENSOR_CORES": is_packed and x.data_ptr() % variants.DESCRIPTOR_BYTES == 0,
        }

    def column_name(self, scale: Tensor, weight: Tensor) -> str:
        """Name how a scale belongs to its weight."""
        return eager.scale_columns(scale.shape[1], weight.shape[1])


def features_of(call: ExpertsArguments) -> variants.Features:
    """Return what of a call decides which variants take it."""
    plain = all(
        w.stride(0) == w.shape[1] * w.stride(1)
        and w.stride(1) % variants.DESCRIPTOR_BYTES == 0
        and w.data_ptr() % variants.DESCRIPTOR_BYTES == 0
        for w in (call.w13, call.w2)
    )
    return variants.Features(
        call.activation_quant,
        call.hidden_states.dtype == torch.int8,
        call.apply_router_weight_on_input,
        plain,
    )


def experts(call: ExpertsArguments, variant: variants.Variant) -> Tensor | None:
    """Compute a call by a variant on the current device; None if that does not take it."""
    up, down = eager.layer_products(call)
    device = eager.facts_of(call.hidden_states.device)
    features = features_of(call)
    if not variants.takes(variant, up, down, device, features):
        variant = variants.choose(up, down, device, features)
    if variant.name == "apart":
        return None
    host = EagerHost(call)
    if variant.name == "decode":
        output: Tensor = variant_layers.decode(host, variant, None)
        return output
    is_by_token = not variant.up.is_ordered
    rows = None
    if is_by_token and variant_rows.takes(call, call.hidden_states.dtype, up.depth):
        rows = variant_rows.codes(host, host.contiguous(call.hidden_states), call.a13_scale)
    plan = routing.plan(
        call.topk_ids,
        call.expert_map,
        num_experts=call.w13.shape[0],
        block_m=variant.up.block_m,
        is_inverse_wanted=not is_by_token,
        is_progress_wanted=variant.up.loads == "stream",
        options=host.options,
    )
    if is_by_token and rows is None:
        first = eager.first_rows(call, plan)
        rows = (first.values, first.scale, first.has_row_scale)
    parts = variant_layers.fused(host, variant, plan, rows)
    return eager.combine(call, parts, plan, **host.options())
