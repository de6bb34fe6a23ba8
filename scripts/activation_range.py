"""Penalise rare large activations inside experts, so that one scale per tensor can serve them.

A SwiGLU expert multiplies two projections, and a few of the products end up 40 times the usual
size: one scale for all of them then leaves the usual ones some three bits. The penalty is free of
units (each layer's activations over their own root mean square), so that it cannot be met by
making all activations smaller and the weights after them larger.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RangePenalty:
    """Watch the activations that enter w2 in every experts module, until removed."""

    def __init__(self, model: nn.Module, *, limit: float) -> None:
        self.limit = limit
        self.excesses: list[Tensor] = []
        self.watched = [module for module in model.modules() if hasattr(module, "_apply_gate")]
        if not self.watched:
            raise ValueError(
                f"model: wanted gated experts modules, {type(model).__name__} has none"
            )
        for module in self.watched:
            module._apply_gate = self._recording(module._apply_gate)  # type: ignore[assignment]

    def _recording(self, apply_gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def recorded(gate_up: Tensor) -> Tensor:
            activated = apply_gate(gate_up)
            values = activated.float()
            ratio = values.abs() / values.pow(2).mean().sqrt().clamp_min(1e-6)
            self.excesses.append(torch.relu(ratio - self.limit).pow(2).sum() / len(values))
            return activated

        return recorded

    def take(self) -> Tensor:
        """Return the penalty per contribution, summed over the layers since the last call."""
        total = torch.stack(self.excesses).sum()
        self.excesses.clear()
        return total

    def remove(self) -> None:
        """Give the modules their own gate back."""
        for module in self.watched:
            del module._apply_gate
