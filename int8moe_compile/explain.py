"""Say for every experts layer of a model whether it runs in INT8, by which backend, or why not."""

from __future__ import annotations

from typing import Any

from torch import nn


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Explain."""
