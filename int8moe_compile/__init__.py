"""INT8 experts for every Hugging Face mixture-of-experts model under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ops as _ops  # noqa: F401  registers torch.ops.int8moe
from .api import disable, enable, enabled, explain, quantize_
from .oracle import Choice, DeviceFacts, MoeProblem, select_int8_moe_backend
from .schemes import (
    INT8_DYNAMIC_TENSOR,
    INT8_DYNAMIC_TOKEN,
    INT8_STATIC_CHANNEL,
    INT8_STATIC_TENSOR,
    QuantKey,
)

if TYPE_CHECKING:
    from .hf import Int8MoeConfig

__version__ = "0.1.0"

__all__ = [
    "INT8_DYNAMIC_TENSOR",
    "INT8_DYNAMIC_TOKEN",
    "INT8_STATIC_CHANNEL",
    "INT8_STATIC_TENSOR",
    "Choice",
    "DeviceFacts",
    "Int8MoeConfig",
    "MoeProblem",
    "QuantKey",
    "disable",
    "enable",
    "enabled",
    "explain",
    "quantize_",
    "select_int8_moe_backend",
]


def __getattr__(name: str) -> Any:
    # Needs transformers, which importing this package must not.
    if name == "Int8MoeConfig":
        from .compat import require_transformers

        require_transformers()
        from .hf import Int8MoeConfig

        return Int8MoeConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
