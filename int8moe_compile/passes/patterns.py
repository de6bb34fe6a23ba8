"""Trace Hugging Face's own experts functions and the known gates into graphs to compare with.

Letters: T tokens, K experts per token, S = T*K, E experts, H hidden, I intermediate, N = 2*I gated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx

from ..compat import trace_functional
from ..structure import Gate, Layout
from .layouts import to_hf_bias, to_hf_layout

# Name -> shape and dtype, in the order of the arguments.
Inputs = dict[str, tuple[tuple[int, ...], torch.dtype]]

Widened = Literal["", "activation", "halves", "rows"]

IMPLEMENTATIONS: Final = ("grouped_mm", "batched_mm")
# The operator's word -> Hugging Face's names of functions that compute it in different spellings.
HF_ACTIVATIONS: Final[dict[str, tuple[str, ...]]] = {
    "silu": ("silu",),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": (
        "gelu_pytorch_tanh",
        "gelu_python_tanh",
        "gelu_new",
        "gelu_fast",
        "gelu_accurate",
    ),
    "relu": ("relu",),
    "relu2": ("relu2",),
}


@dataclass(frozen=True)
class Literals:
    """Hold the numbers in a gate; the defaults stand for any number while a pattern is traced."""

    alpha: float = 1.3718281828
    beta: float = 5.5432109876
    limit: float = 93.1415926535


STAND_INS: Final = Literals()


@dataclass(frozen=True)
class Problem:
    """State sizes, dtypes and device of one experts call, as numbers.

    autocast: the dtype of the autocast context around the call, None for none.
    product_dtype: that of the two products, in which the gate starts.
    gated_dtype: what the gate returns; a GPU's autocast takes powers and sums in fp32.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    device: torch.device
    weight_dtype: torch.dtype
    hidden_dtype: torch.dtype
    router_dtype: torch.dtype
    bias_dtype: torch.dtype
    product_dtype: torch.dtype
    gated_dtype: torch.dtype
    id_dtype: torch.dtype = torch.int64
    autocast: torch.dtype | None = None

    @property
    def rows(self) -> int:
        """Return N, the rows of w13."""
        return 2 * self.intermediate if self.gated else self.intermediate

    def inputs(self, has_bias: bool) -> Inputs:
        """Return shape and dtype of every input of an experts call, in our layout."""
        routing = (self.tokens, self.top_k)
        named: Inputs = {
            "hidden_states": ((self.tokens, self.hidden), self.hidden_dtype),
            "topk_ids": (routing, self.id_dtype),
            "topk_weights": (routing, self.router_dtype),
            "w13": ((self.experts, self.rows, self.hidden), self.weight_dtype),
            "w2": ((self.experts, self.hidden, self.intermediate), self.weight_dtype),
        }
        if has_bias:
            named["w13_bias"] = ((self.experts, self.rows), self.bias_dtype)
            named["w2_bias"] = ((self.experts, self.hidden), self.bias_dtype)
        return named


@dataclass(frozen=True)
class Pattern:
    """A traced function: its inputs by name and the nodes it returns."""

    inputs: dict[fx.Node, str]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Spelling:
    """Say how a gate is written: which function, clamped or not, shifted up rows or not.

    function is a name of Hugging Face's, "swish" for ``x * sigmoid(alpha * x)``, or "sigmoid"
    for the same without alpha. widened is the part that runs in fp32: nothing but what PyTorch
    widens by itself (""), the activation, or the whole gate, cast once behind it, with the rows
    cast together ("rows") or gate and up apart ("halves"). The operator's own gate runs in fp32
    and rounds once, so that all of them are equal but for roundings on the way.
    """

    activation: str
    function: str
    clamped: bool = False
    shifted: bool = False
    gated: bool = True
    widened: Widened = ""

    def gate(self, literals: Literals) -> Gate:
        """Return the operator's arguments for this gate with these numbers in it."""
        return Gate(
            activation=self.activation,
            alpha=float(literals.alpha) if self.function == "swish" else 1.0,
            beta=float(literals.beta) if self.shifted else 0.0,
            limit=float(literals.limit) if self.clamped else None,
            gated=self.gated,
        )

    def apply(self, projected: Tensor, literals: Literals, *, interleaved: bool) -> Tensor:
        """Run the gate on [S,N] as a Hugging Face module would.

        One that does not widen casts nothing, so that it keeps the dtype that autocast gives it.
        """
        dtype = projected.dtype
        if self.widened == "rows":
            projected = projected.float()
        if not self.gated:
            activated = self._activate(projected, literals)
            return activated.to(dtype) if self.widened else activated
        if interleaved:
            gate, up = projected[..., ::2], projected[..., 1::2]
        else:
            gate, up = projected.chunk(2, dim=-1)
        if self.widened == "halves":
            gate, up = gate.float(), up.float()
        if self.clamped:
            gate = gate.clamp(max=literals.limit)
            up = up.clamp(min=-literals.limit, max=literals.limit)
        if self.shifted:
            up = up + literals.beta
        if self.widened == "activation":
            gate = gate.float()
            return self._activate(gate, literals).to(dtype) * up
        product = self._activate(gate, literals) * up
        return product.to(dtype) if self.widened else product

    def _activate(self, x: Tensor, literals: Literals) -> Tensor:
        if self.function == "swish":
            return x * torch.sigmoid(x * literals.alpha)
        if self.function == "sigmoid":
            return x * torch.sigmoid(x)
        from transformers.activations import ACT2FN

        result: Tensor = ACT2FN[self.function](x)
        return result


def spellings(*, gated: bool, cast: bool) -> list[Spelling]:
    """List every gate that is known, the plain ones first.

    cast: those that end with a cast from fp32, otherwise those that do not.
    """
    functions = [(word, name) for word, names in HF_ACTIVATIONS.items() for name in names]
    functions.append(("silu", "sigmoid"))
    if not gated:
        # Some activations end with a cast themselves, as PyTorch decomposes them.
        alone: tuple[Widened, ...] = ("", "rows") if cast else ("",)
        return [
            Spelling(word, name, gated=False, widened=widened)
            for widened in alone
            for word, name in functions
        ]
    functions.insert(1, ("silu", "swish"))
    wide: tuple[Widened, ...] = ("halves", "rows") if cast else ("", "activation")
    return [
        Spelling(word, name, clamped, shifted, widened=widened)
        for widened in wide
        for clamped in (False, True)
        for shifted in (False, True)
        for word, name in functions
    ]


def _trace(
    function: Callable[..., Any],
    inputs: Inputs,
    device: torch.device,
    autocast: torch.dtype | None,
) -> Pattern:
    """Trace a function of named tensors on fake ones."""
    graph = trace_functional(function, list(inputs.values()), device, autocast).graph
    nodes = list(graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    (returned,) = nodes[-1].args
    outputs = tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)
    return Pattern(dict(zip(placeholders, inputs, strict=True)), outputs)


class _StandIn(SimpleNamespace):
    """An experts module for Hugging Face's functions; what it is not told about, it is not.

    Later transformers ask for more properties (5.24: _is_expert_parallel, has_post_expert_norm).
    A graph of a module that has one of them differs from what is traced here, and is refused.
    """

    def __getattr__(self, name: str) -> bool:
        if name.startswith(("has_", "is_", "_is_")):
            return False
        raise AttributeError(name)


def _hf_forward(
    implementation: str,
    layout: Layout,
    problem: Problem,
    tensors: dict[str, Tensor],
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Run Hugging Face's function on a stand-in for the experts module."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    w13_name = "gate_up_proj" if problem.gated else "up_proj"
    module = _StandIn(
        num_experts=problem.experts,
        has_gate=problem.gated,
        has_bias=layout.has_bias,
        is_transposed=layout.transposed,
        is_concatenated=not layout.interleaved,
        _apply_gate=gate,
        act_fn=gate,
    )
    setattr(module, w13_name, to_hf_layout(tensors["w13"], layout, "w13"))
    module.down_proj = to_hf_layout(tensors["w2"], layout, "w2")
    if layout.has_bias:
        setattr(module, f"{w13_name}_bias", to_hf_bias(tensors["w13_bias"], layout, "w13"))
        module.down_proj_bias = to_hf_bias(tensors["w2_bias"], layout, "w2")
    result: Tensor = ALL_EXPERTS_FUNCTIONS[implementation](
        module, tensors["hidden_states"], tensors["topk_ids"], tensors["topk_weights"]
    )
    return result


@functools.lru_cache(maxsize=64)
def frame_pattern(implementation: str, layout: Layout, problem: Problem) -> Pattern:
    """Trace an experts call around its gate.

    Inputs are those of the problem and "gated" [S,I], what the gate returns; outputs are the
    result of the call and what enters the gate.
    """
    inputs = problem.inputs(layout.has_bias)

    def frame(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        *given, gated = tensors
        entering = []

        def gate(projected: Tensor) -> Tensor:
            entering.append(projected)
            return gated

        named = dict(zip(inputs, given, strict=True))
        result = _hf_forward(implementation, layout, problem, named, gate)
        return result, entering[0]

    slots = problem.tokens * problem.top_k
    with_gated = {**inputs, "gated": ((slots, problem.intermediate), problem.gated_dtype)}
    return _trace(frame, with_gated, problem.device, problem.autocast)


@functools.lru_cache(maxsize=256)
def gate_pattern(spelling: Spelling, interleaved: bool, problem: Problem) -> Pattern:
    """Trace a gate from its input "projected" [S,N], with stand-ins for its numbers."""

    def gate(projected: Tensor) -> Tensor:
        return spelling.apply(projected, STAND_INS, interleaved=interleaved)

    shape = (problem.tokens * problem.top_k, problem.rows)
    inputs: Inputs = {"projected": (shape, problem.product_dtype)}
    return _trace(gate, inputs, problem.device, problem.autocast)


@functools.lru_cache(maxsize=64)
def full_pattern(
    implementation: str, layout: Layout, problem: Problem, spelling: Spelling, literals: Literals
) -> Pattern:
    """Trace an experts call with everything known: what a region must equal."""
    inputs = problem.inputs(layout.has_bias)

    def gate(projected: Tensor) -> Tensor:
        return spelling.apply(projected, literals, interleaved=layout.interleaved)

    def whole(*tensors: Tensor) -> Tensor:
        named = dict(zip(inputs, tensors, strict=True))
        return _hf_forward(implementation, layout, problem, named, gate)

    return _trace(whole, inputs, problem.device, problem.autocast)
