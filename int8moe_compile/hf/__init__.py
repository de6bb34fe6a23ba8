"""Hugging Face integration: importing it registers everything with transformers."""

from __future__ import annotations

from .checkpoint_entries import register as _register_checkpoints
from .config import Int8MoeConfig
from .discovery import find_experts, is_experts
from .experts import IMPLEMENTATION, experts_arguments
from .experts import register as _register_experts
from .quantizer import attach as attach_quantizer
from .record import ExpertsRecord, live_record, reason_of, record_of

__all__ = [
    "IMPLEMENTATION",
    "ExpertsRecord",
    "Int8MoeConfig",
    "attach_quantizer",
    "experts_arguments",
    "find_experts",
    "is_experts",
    "live_record",
    "reason_of",
    "record_of",
    "register",
]


def register() -> None:
    """Register with transformers; more than once is harmless."""
    _register_experts()
    _register_checkpoints()


register()
