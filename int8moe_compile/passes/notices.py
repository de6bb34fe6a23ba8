"""Warn about what makes a quantised model slow, once a process each."""

from __future__ import annotations

import warnings
from typing import Any, Final

from ..compat import tracing_for_inductor

PASS_OFF: Final = (
    "compiling INT8 experts without the graph pass of int8moe_compile: their weights are "
    "dequantised on every call, slower than bfloat16. Call int8moe_compile.enable() before the "
    'first call of the compiled model, or compile with backend="int8moe".'
)
GRADIENTS: Final = (
    "int8moe_compile leaves a graph alone that computes gradients: INT8 experts are for inference "
    "and run dequantised here. Run the model under torch.inference_mode() or torch.no_grad()."
)
DEQUANTISED: Final = "{name}: INT8 experts run dequantised: {reason}"

_given: set[str] = set()


def warn_once(message: str, about: str | None = None) -> None:
    """Give a warning unless it, or another about the same, was given before."""
    about = message if about is None else about
    if about not in _given:
        _given.add(about)
        warnings.warn(message, UserWarning, stacklevel=2)


def forget() -> None:
    """Let every warning be given again."""
    _given.clear()


def marker_traced() -> None:
    """Warn when torch.compile traces int8 weights for Inductor and the pass will not run.

    Told so by the marker's fake: also where Inductor then finds the graph in its cache.
    """
    settings = tracing_for_inductor()
    if settings is not None:
        _warn_without_pass(settings)


def marker_lowered() -> None:
    """Warn when Inductor lowers int8 weights and the pass has not run.

    Told so by the marker's lowering: also where Dynamo did not trace, as for AOTInductor.
    """
    _warn_without_pass({})


def _warn_without_pass(settings: dict[str, Any]) -> None:
    from torch._inductor import config

    from .joint import ExpertsPass, as_passes

    slot = settings.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    if not any(isinstance(entry, ExpertsPass) for entry in as_passes(slot)):
        warn_once(PASS_OFF)
