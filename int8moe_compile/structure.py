"""How one Hugging Face experts module lays out its weights and applies its gate, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """Name the activation between the two products, with the operator's own arguments.

    Gated: ``f(min(g, limit)) * (clamp(u, -limit, limit) + beta)`` with silu as
    ``x * sigmoid(alpha * x)``. Not gated: ``f(h)``.
    """

    activation: str = "silu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    gated: bool = True


@dataclass(frozen=True)
class Layout:
    """Say how Hugging Face stores the weights that we keep as [E,N,H] and [E,H,I].

    transposed: the module's own tensors are [E,H,N] and [E,I,H].
    interleaved: gate and up rows alternate in the module's own tensor (ours: gate first, then up).
    has_bias: the module carries ``<weight>_bias`` [E,N] and [E,H]; ours are gate first, too.
    """

    transposed: bool = False
    interleaved: bool = False
    has_bias: bool = False


@dataclass(frozen=True)
class ExpertsStructure:
    """Everything about a module that the operator must know and its tensors do not say."""

    gate: Gate = Gate()
    layout: Layout = Layout()
    w13_name: str = "gate_up_proj"
    w2_name: str = "down_proj"
