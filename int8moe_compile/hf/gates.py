"""Recognise what an experts module does between its two products, by evaluating its own code.

Nothing is read from names. The module's ``_apply_gate`` (or ``act_fn`` without a gate) runs on
fp64 probes; the parameters of the operator's formula are fitted to a few values and the formula
must then reproduce the code on an adversarial grid. Otherwise the module is refused with a reason.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..ops.activation import apply_gate
from ..ops.schema import ACTIVATIONS
from ..structure import Gate

# Formulas that the operator knows differ by more than 1e-4 somewhere on the grid; activations that
# compute in fp32 inside differ from their fp64 formula by some 1e-7.
TOLERANCE: Final = 1e-6
# Small enough to stay below any sensible limit, exact in every float dtype.
SMALL: Final = 2.0**-5
FAR: Final = 2.0**20
GRID: Final = (-1e4, -100.0, -20.0, -7.5, -3.0, -1.0, -0.5, -0.1, 0.0)

Reads = tuple[tuple[str, Any], ...]


class UnknownGateError(Exception):
    """Say why no formula of the operator describes a module's gate."""


@dataclass(frozen=True)
class Recognised:
    """Hold a gate, whether gate and up alternate, and every attribute that the code read."""

    gate: Gate
    interleaved: bool
    reads: Reads


class _Recorder:
    """Stand in for a module and note which of its plain attributes its own code reads."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._reads: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, types.MethodType) and value.__self__ is self._module:
            return types.MethodType(value.__func__, self)
        if not isinstance(value, Tensor):
            self._reads[name] = value
        return value


def recognise_gate(module: nn.Module) -> Recognised:
    """Find the operator's gate that equals the module's; raises UnknownGateError with the reason.

    Runs on CPU in fp64, with and for any device or dtype of the module.
    """
    _refuse_more_than_a_gate(module)
    recorder = _Recorder(module)
    with torch.no_grad():
        try:
            if module.has_gate:
                gate, interleaved = _recognise_gated(recorder._apply_gate, recorder)
            else:
                gate, interleaved = _recognise_plain(recorder.act_fn), False
        except UnknownGateError:
            raise
        except Exception as error:
            text = f"its gate cannot be evaluated on probe data: {type(error).__name__}: {error}"
            raise UnknownGateError(text) from error
    return Recognised(gate, interleaved, tuple(sorted(recorder._reads.items(), key=lambda r: r[0])))


def _refuse_more_than_a_gate(module: nn.Module) -> None:
    """Refuse a module with steps beside products, biases and gate, which the operator lacks.

    muse_spark of transformers 5.24 normalises every expert's result, for one.
    """
    weights = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    known = {name + suffix for name in weights for suffix in ("", "_bias")}
    names = (name for name, _ in module.named_parameters())
    more = [name for name in names if name not in known and not name.startswith("act_fn.")]
    flags = [n for n, flag in vars(module).items() if n.startswith("has_") and flag is True]
    more += [name for name in flags if name not in ("has_gate", "has_bias")]
    if more:
        raise UnknownGateError(f"it computes more than the operator does: {', '.join(more)}")


def still_reads_the_same(module: nn.Module, reads: Reads) -> bool:
    """Say whether every attribute that decided the gate has the value it had then."""
    for name, seen in reads:
        value = getattr(module, name, None)
        if value is not seen and not (isinstance(seen, (int, float, str)) and value == seen):
            return False
    return True


def _recognise_plain(function: Callable[[Tensor], Tensor]) -> Gate:
    """Match an activation without a gate."""
    probe = _column(_grid(None))
    got = function(probe.clone())
    for activation in ACTIVATIONS:
        gate = Gate(activation=activation, gated=False)
        if _equal(got, _formula(probe, gate)):
            return gate
    raise UnknownGateError(f"its activation is none of {', '.join(ACTIVATIONS)}")


def _recognise_gated(
    function: Callable[[Tensor], Tensor], recorder: _Recorder
) -> tuple[Gate, bool]:
    """Match a gate whose rows are concatenated or alternate, gate before up."""
    for swapped in (False, True):
        for interleaved in (False, True):
            gate = _fit(_paired(function, interleaved, swapped), recorder)
            if gate is None:
                continue
            if swapped:
                raise UnknownGateError("its gate takes the up rows first and the gate rows second")
            return gate, interleaved
    known = ", ".join(ACTIVATIONS)
    raise UnknownGateError(f"its gate is no clamped or plain product with one of {known}")


def _paired(
    function: Callable[[Tensor], Tensor], interleaved: bool, swapped: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the gate as a function of gate and up, under one hypothesis about its columns."""

    def call(gate: Tensor, up: Tensor) -> Tensor:
        pair = (up, gate) if swapped else (gate, up)
        columns = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return function(columns)

    return call


def _fit(function: Callable[[Tensor, Tensor], Tensor], recorder: _Recorder) -> Gate | None:
    """Fit beta, limit and alpha to five values, then let the grid decide."""
    gates = torch.tensor([[SMALL] * 3], dtype=torch.float64)
    ups = torch.tensor([[0.0, SMALL, FAR]], dtype=torch.float64)
    at_zero, at_small, at_far = function(gates, ups).flatten().tolist()
    slope = (at_small - at_zero) / SMALL  # f(SMALL)
    if not math.isfinite(slope) or slope == 0.0:
        return None
    known = [value for value in recorder._reads.values() if isinstance(value, (int, float))]
    beta = _snapped(at_zero / slope, (0.0, 1.0, *known))
    reach = at_far / slope - beta
    limit = None if not reach < FAR / 2 else _snapped(reach, known)
    ratio = slope / SMALL
    alpha = math.log(ratio / (1.0 - ratio)) / SMALL if 0.0 < ratio < 1.0 else 1.0
    alpha = _snapped(alpha, (1.0, 1.702, *known))
    if limit is not None and limit < 0.0:
        return None
    for activation in ACTIVATIONS:
        gate = Gate(activation, alpha if activation == "silu" else 1.0, beta, limit)
        if _matches(function, gate):
            return gate
    return None


def _matches(function: Callable[[Tensor, Tensor], Tensor], gate: Gate) -> bool:
    """Compare code and formula on every pair of grid values."""
    grid = _grid(gate.limit)
    pairs = torch.cartesian_prod(grid, grid)
    gates, ups = pairs[:, 0].reshape(grid.numel(), -1), pairs[:, 1].reshape(grid.numel(), -1)
    got = function(gates.clone(), ups.clone())
    # In fp32, gelu loses digits where 1 + tanh(g) or 1 + erf(g) is nearly 0, and up enlarges that.
    size = (1.0 + gates.abs().clamp(max=100.0)) * (1.0 + ups.abs())
    return _equal(got, _formula(torch.cat((gates, ups), -1), gate), size)


def _grid(limit: float | None) -> Tensor:
    """Return probe values of both signs: tiny, ordinary, huge and on both sides of the limit."""
    around = () if limit is None else (limit * 0.99, limit, limit * 1.01, limit * 3.0)
    positive = [-value for value in GRID] + list(around)
    return torch.tensor(sorted({*positive, *(-value for value in positive)}), dtype=torch.float64)


def _column(values: Tensor) -> Tensor:
    return values.reshape(-1, 1)


def _formula(h: Tensor, gate: Gate) -> Tensor:
    return apply_gate(
        h,
        activation=gate.activation,
        alpha=gate.alpha,
        beta=gate.beta,
        limit=gate.limit,
        gated=gate.gated,
    )


def _equal(got: object, wanted: Tensor, size: Tensor | float = 1.0) -> bool:
    """Compare within the rounding of an activation that works in fp32 inside.

    size: the magnitude of what was rounded on the way, beside that of the result.
    """
    if not isinstance(got, Tensor) or got.shape != wanted.shape:
        return False
    difference = (got.to(torch.float64) - wanted).abs()
    return bool((difference <= TOLERANCE * (wanted.abs() + size)).all())


def _snapped(value: float, known: Iterable[float]) -> float:
    """Return the known value that a fit means, or the fit rounded to what it can resolve."""
    for candidate in known:
        if math.isclose(value, candidate, rel_tol=1e-4, abs_tol=1e-6):
            return float(candidate)
    return float(f"{value:.6g}")
