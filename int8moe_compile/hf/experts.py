"""The experts implementation "int8moe" of transformers, and a module's operator arguments."""

from __future__ import annotations

import functools
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from .. import passes, registry
from ..ops.checks import FLOATS
from ..ops.register import operator_of
from ..oracle import MoeProblem, select_int8_moe_backend
from ..schemes import INT8_DYNAMIC_TOKEN, INT8_STATIC_CHANNEL
from .gates import UnknownGateError
from .record import live_record
from .view import BIAS, INPUT_SCALE, SCALE, ExpertsView, is_complete

IMPLEMENTATION: Final = "int8moe"
# The default of transformers, the only name that quantize_ replaces.
DEFAULT_IMPLEMENTATION: Final = "grouped_mm"


def experts_arguments(module: nn.Module) -> dict[str, Any]:
    """Return a quantised module's keyword arguments for ``torch.ops.int8moe.experts``.

    Everything but hidden_states, topk_weights and topk_ids. The gate's numbers are those of the
    module now, not of when it was quantised. Raises UnknownGateError if its gate became unknown.
    """
    record = live_record(module)
    structure = record.structure
    gate, w13, w2 = structure.gate, structure.w13_name, structure.w2_name
    arguments: dict[str, Any] = {
        "w13": getattr(module, w13),
        "w13_scale": getattr(module, w13 + SCALE),
        "w2": getattr(module, w2),
        "w2_scale": getattr(module, w2 + SCALE),
        "activation_quant": record.scheme.activation_quant,
        "activation": gate.activation,
        "alpha": gate.alpha,
        "beta": gate.beta,
        "limit": gate.limit,
        "gated": gate.gated,
    }
    if record.scheme.activation_quant == "static":
        arguments["a13_scale"] = getattr(module, w13 + INPUT_SCALE)
        arguments["a2_scale"] = getattr(module, w2 + INPUT_SCALE)
    if structure.layout.has_bias:
        arguments["w13_bias"] = getattr(module, w13 + BIAS)
        arguments["w2_bias"] = getattr(module, w2 + BIAS)
    return arguments


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run a module's experts: the operator where it can stand alone, otherwise transformers' code.

    The operator runs in eager mode when no gradient is wanted, that of humming where enable() asked
    for it. While compiling, the graph pass decides; a gradient needs float weights; an unquantised
    module has no codes. Raises ValueError where enable() named a backend that does not run on the
    device.
    """
    if not torch.compiler.is_compiling():
        arguments = _eager_arguments(self, hidden_states, top_k_weights)
        if arguments is not None:
            operator = operator_of(passes.asked_backend())
            result = operator(
                hidden_states, topk_weights=top_k_weights, topk_ids=top_k_index, **arguments
            )
            return cast(Tensor, result)
    return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


def _eager_arguments(
    view: object, hidden_states: Tensor, top_k_weights: Tensor
) -> dict[str, Any] | None:
    """Return the operator's arguments, None where transformers' own code has to run."""
    if not isinstance(view, ExpertsView) or not is_complete(view._module):
        return None
    wanted = hidden_states.requires_grad or top_k_weights.requires_grad
    if torch.is_grad_enabled() and wanted:
        return None
    if hidden_states.dtype not in FLOATS or top_k_weights.dtype not in FLOATS:
        return None
    _want_honoured(passes.asked_backend(), hidden_states.device)
    if hidden_states.device.type not in registry.KERNELS or not _runs_on(hidden_states.device):
        return None
    try:
        return experts_arguments(view._module)
    except UnknownGateError:
        return None


@functools.cache
def _want_honoured(backend: str, device: torch.device) -> None:
    """Refuse a device that a named backend is not for; one with its own operator does so itself."""
    if backend != passes.AUTO and operator_of(backend) is operator_of(passes.AUTO):
        _select(device, backend)


@functools.cache
def _runs_on(device: torch.device) -> bool:
    """Ask the oracle, once a device, whether it has a backend."""
    try:
        _select(device, passes.AUTO)
    except NotImplementedError:
        return False
    return True


def _select(device: torch.device, backend: str) -> None:
    """Let the oracle choose for a device; problems do not matter to that."""
    smallest = MoeProblem(num_experts=1, top_k=1, hidden_size=1, intermediate_size=1)
    select_int8_moe_backend(
        smallest, INT8_STATIC_CHANNEL, INT8_DYNAMIC_TOKEN, backend, device=device
    )


@functools.cache
def register() -> None:
    """Register the implementation with transformers, once a process."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
