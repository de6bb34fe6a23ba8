"""The operators' fakes: the same checks as the kernels, and the result's shape and dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import registry
from .arguments import ExpertsArguments
from .checks import check_dequantize, check_experts
from .humming import check_humming


def experts(*args: Any, **kwargs: Any) -> Tensor:
    """Describe the result of int8moe::experts: [T,H] contiguous, of the result dtype."""
    registry.load_lowerings()
    call = ExpertsArguments(*args, **kwargs)
    check_experts(call, traced=True)
    return call.hidden_states.new_empty(call.hidden_states.shape, dtype=call.result_dtype)


def humming_experts(*args: Any, **kwargs: Any) -> Tensor:
    """Describe the result of int8moe::humming_experts: that of int8moe::experts."""
    result = experts(*args, **kwargs)
    check_humming(ExpertsArguments(*args, **kwargs))
    return result


def dequantize(
    codes: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype,
    activation_quant: str = "token",
    a_scale: Tensor | None = None,
) -> Tensor:
    """Describe the result of int8moe::dequantize: the codes' shape, contiguous, of dtype."""
    registry.marker_traced()
    check_dequantize(codes, scale, dtype, activation_quant, a_scale)
    return codes.new_empty(codes.shape, dtype=dtype)


def no_backward(grad: Tensor) -> Tensor:
    """Describe the result that int8moe::no_backward never returns."""
    return torch.empty_like(grad)


def product(out: Tensor, *args: Any) -> None:
    """Describe products of lowerings/wgmma.py and stream.py, which write and return nothing."""
