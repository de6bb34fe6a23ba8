"""Warn about what makes a quantised model slow, once a process each."""

from __future__ import annotations

import warnings
from typing import Final

PASS_OFF: Final = (
    "compiling INT8 experts without the graph pass of int8moe_compile: their weights are "
    "dequantised on every call, slower than bfloat16. Call int8moe_compile.enable() before the "
    'first call of the compiled model, or compile with backend="int8moe".'
)
GRADIENTS: Final = (
    "int8moe_compile leaves a graph alone that computes gradients: INT8 experts are for inference "
    "and run dequantised here. Run the model under torch.inference_mode() or torch.no_grad()."
)

_given: set[str] = set()


def warn_once(message: str) -> None:
    """Give a warning unless it was given before."""
    if message not in _given:
        _given.add(message)
        warnings.warn(message, UserWarning, stacklevel=2)


def forget() -> None:
    """Let every warning be given again."""
    _given.clear()
