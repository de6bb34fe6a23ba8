"""The operators' contract: schema, checks, meaning (reference), CPU kernel. Imports torch only."""

from __future__ import annotations

from .register import dequantize, experts

__all__ = ["dequantize", "experts"]
