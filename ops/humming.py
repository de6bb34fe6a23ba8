"""Refuse what ``int8moe::humming_experts`` cannot run beyond what its arguments' checks refuse."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compat import size_hint
from .arguments import ExpertsArguments
from .checks import refuse

OUTPUTS = (torch.bfloat16, torch.float16)
# Bytes of one load of its kernels: rows of codes have to consist of whole ones.
ROW_MULTIPLE = 16


def check_humming(call: ExpertsArguments) -> None:
    """Check one call of int8moe::humming_experts that int8moe::experts would take.

    Raises ValueError naming the argument, what was wanted, what came: a user asked for this
    backend by name, so there is no other to fall back to.
    """
    if call.activation_quant != "token":
        refuse("activation_quant", "'token' with humming", repr(call.activation_quant))
    for name, bias in (("w13_bias", call.w13_bias), ("w2_bias", call.w2_bias)):
        if bias is not None:
            refuse(name, "None with humming", f"shape {list(bias.shape)}")
    if not call.gated:
        refuse("gated", "True with humming", call.gated)
    if call.activation != "silu":
        refuse("activation", "'silu' with humming", repr(call.activation))
    if call.result_dtype not in OUTPUTS:
        wanted = " or ".join(str(dtype) for dtype in OUTPUTS)
        refuse("out_dtype", f"{wanted} with humming (default: as hidden_states)", call.result_dtype)
    _want_weight("w13", call.w13, call.w13_scale)
    _want_weight("w2", call.w2, call.w2_scale)
    if call.hidden_states.device.type != "cuda":
        refuse("hidden_states", "a CUDA tensor with humming", call.hidden_states.device)


def _want_weight(name: str, codes: Tensor, scale: Tensor) -> None:
    """Want one scale a row, and rows of whole loads; sizes are those of this call."""
    experts, rows, columns = (size_hint(size) for size in codes.shape)
    if size_hint(scale.shape[1]) != rows:
        wanted = f"one value a row, shape [{experts}, {rows}], with humming"
        refuse(f"{name}_scale", wanted, list(scale.shape))
    if columns % ROW_MULTIPLE:
        refuse(name, f"rows of a multiple of {ROW_MULTIPLE} codes with humming", list(codes.shape))
