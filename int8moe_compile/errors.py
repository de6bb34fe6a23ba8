"""The one exception class of the package beside Python's own."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Refuse a checkpoint; the message names the layer, expert and projection, or the entry."""
