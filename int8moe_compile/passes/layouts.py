"""Turn expert weights and biases from our layout into Hugging Face's and back, as pure functions.

Ours: w13 [E,N,H] (gate rows first, then up rows), w2 [E,H,I], their biases [E,N] and [E,H].
Hugging Face's: see structure.Layout. A gated w13 may alternate gate and up rows, and both weights
may be stored transposed. The functions are traced by torch.compile, so the marker of a weight stays
one node with a chain of views and one copy behind it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..structure import Layout

Which = Literal["w13", "w2"]


def interleave(rows: Tensor) -> Tensor:
    """Alternate the first and the second half of dimension 1: [g0..gn, u0..un] -> [g0,u0,g1,..]."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def deinterleave(rows: Tensor) -> Tensor:
    """Undo interleave: even entries of dimension 1 first, then the odd ones."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def to_hf_layout(weight: Tensor, layout: Layout, which: Which) -> Tensor:
    """Return our weight as the module's own code expects it."""
    if which == "w13" and layout.interleaved:
        weight = interleave(weight)
    return weight.transpose(1, 2) if layout.transposed else weight


def from_hf_layout(weight: Tensor, layout: Layout, which: Which) -> Tensor:
    """Return the module's own weight in our layout; a view unless gate and up alternate."""
    if layout.transposed:
        weight = weight.transpose(1, 2)
    return deinterleave(weight) if which == "w13" and layout.interleaved else weight


def to_hf_bias(bias: Tensor, layout: Layout, which: Which) -> Tensor:
    """Return our bias [E,N] or [E,H] as the module's own code expects it."""
    return interleave(bias) if which == "w13" and layout.interleaved else bias


def from_hf_bias(bias: Tensor, layout: Layout, which: Which) -> Tensor:
    """Return the module's own bias in our layout."""
    return deinterleave(bias) if which == "w13" and layout.interleaved else bias
