"""The lowering of int8moe::experts: which device's code a call in a graph becomes."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch._inductor import lowering

from ..compat_inductor import order_reloads
from ..ops.arguments import ExpertsArguments
from . import cpu_layer


def register() -> None:
    """Put the lowering into Inductor's table, and right what it would generate for CUDA."""
    if importlib.util.find_spec("triton") is not None:
        order_reloads()
    overload = torch.ops.int8moe.experts.default
    lowering.register_lowering(overload, type_promotion_kind=None)(lower)


def lower(*args: Any, **kwargs: Any) -> Any:
    """Lower one call; where a device has no lowering, the operator itself is called."""
    call = ExpertsArguments(*args, **kwargs)
    hidden: Any = call.hidden_states
    device_type = hidden.get_device().type
    if device_type == "cpu":
        output = cpu_layer.lower(call)
        if output is not None:
            return output
    if device_type == "cuda":
        # Here, because it needs Triton, which not every machine that compiles for its CPU has.
        from . import gpu_layer

        return gpu_layer.lower(call)
    overload = torch.ops.int8moe.experts.default
    return lowering.fallback_handler(overload, add_to_fallback_set=False)(*args, **kwargs)
