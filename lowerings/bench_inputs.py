"""Routing that autotuning times tiles with: every expert gets its average number of rows.

The order and the tile list must be a real routing, or a kernel would read anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import routing
from .routing_ir import likely_size
from .tiles import Product


def generators(
    num_inputs: int, product: Product, block_m: int, top_k: int
) -> dict[int, Callable[[Any], torch.Tensor]]:
    """Return what makes the last two inputs of a template, order and tile list, for timing."""
    make = functools.partial(_plan, product.contributions, product.experts, block_m, top_k)
    return {
        num_inputs - 2: lambda buffer: _like(buffer, make(buffer.get_device()).order),
        num_inputs - 1: lambda buffer: _like(buffer, make(buffer.get_device()).tiles),
    }


def _plan(
    contributions: int, experts: int, block_m: int, top_k: int, device: torch.device
) -> routing.Plan:
    """Route so many contributions at random, the same at every call."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    ids = torch.randint(0, experts, (contributions // top_k, top_k), generator=draw)
    with torch.cuda.device(device):
        return routing.plan(ids.to(device), None, num_experts=experts, block_m=block_m)


def _like(buffer: Any, values: torch.Tensor) -> torch.Tensor:
    """Put values into a tensor of the size that the graph gives the buffer."""
    size = [likely_size(part) for part in buffer.get_size()]
    result = torch.zeros(size, dtype=values.dtype, device=values.device)
    part = tuple(slice(0, min(a, b)) for a, b in zip(size, values.shape, strict=True))
    result[part] = values[part]
    return result
