"""Say for every experts layer of a model whether it runs in INT8, by which backend, or why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .compat import require_transformers
from .oracle import select_int8_moe_backend

if TYPE_CHECKING:
    from .hf.record import ExpertsRecord
    from .passes.outcome import Outcome

NOT_QUANTISED = "not quantised: call int8moe_compile.quantize_(model)"
NO_DATA = (
    "its weights are offloaded or not loaded (device 'meta'); load the model without offloading to "
    "see which backend runs it"
)
NOT_SEEN = "no graph compiled for these inputs contains it"


@dataclass(frozen=True)
class Layer:
    """One experts layer: bytes are those of its two weights with their scales.

    name: dotted name in the model, "" for the model itself. kind: its class. scheme: None unless
    quantised. reason: None where accepted.
    """

    name: str
    kind: str
    scheme: str | None
    accepted: bool
    backend: str | None
    reason: str | None
    bytes_before: int
    bytes_after: int


class Explanation(list[Layer]):
    """The layers of a model in its own order; as text, a table."""

    def __str__(self) -> str:
        if not self:
            return "no experts layers"
        names = [field.name for field in fields(Layer)]
        rows = [[_cell(getattr(layer, name)) for name in names] for layer in self]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines = [names, ["-" * width for width in widths], *rows]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """Explain every experts layer of a Hugging Face model.

    Without inputs: from the modules alone, whether quantised, and what the oracle says. With
    inputs (those of ``model(*args, **kwargs)``): compiles the model for them as far as the graph
    pass, without making code, runs it once under no_grad, and says which layers the pass
    rewrote; other passes that the user installed in its place run before it, as when compiling.
    That forgets what was compiled before (torch.compiler.reset). Raises TypeError for no module.
    """
    require_transformers()
    from . import passes
    from .hf import find_experts
    from .hf.unsupported import find_unsupported

    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: wanted a torch.nn.Module, got {type(model).__name__}")
    active = passes.installed()
    backend = "auto" if active is None else active.backend
    layers = [_judge(name, module, backend) for name, module in find_experts(model)]
    layers += [_refused(name, module) for name, module in find_unsupported(model)]
    if args or kwargs:
        outcomes = _compile(model, args, kwargs, backend)
        layers = [_with_outcome(layer, outcomes) for layer in layers]
    return Explanation(layers)


def _judge(name: str, module: nn.Module, backend: str) -> Layer:
    """Describe a layer from its module."""
    from .hf import reason_of, record_of
    from .hf.discovery import weight_names

    weights = [getattr(module, weight) for weight in weight_names(module)]
    record = record_of(module)
    if record is None:
        size = sum(weight.nbytes for weight in weights)
        why = reason_of(module) or NOT_QUANTISED
        return Layer(name, type(module).__name__, None, False, None, why, size, size)
    chosen, reason = _ask(module, record, backend)
    return Layer(
        name=name,
        kind=type(module).__name__,
        scheme=record.scheme.name,
        accepted=chosen is not None,
        backend=chosen,
        reason=reason,
        bytes_before=sum(weight.numel() for weight in weights) * record.dtype.itemsize,
        bytes_after=_int8_bytes(module),
    )


def _refused(name: str, module: nn.Module) -> Layer:
    """Describe experts that transformers keeps outside its experts interface."""
    from .hf.unsupported import reason_unsupported

    size = sum(weight.nbytes for weight in module.parameters())
    reason = reason_unsupported(module)
    return Layer(name, type(module).__name__, None, False, None, reason, size, size)


def _int8_bytes(module: nn.Module) -> int:
    """Count the bytes of weights and scales as they are."""
    from .hf.discovery import weight_names
    from .hf.view import INPUT_SCALE, SCALE

    tensors = [
        getattr(module, name + suffix, None)
        for name in weight_names(module)
        for suffix in ("", SCALE, INPUT_SCALE)
    ]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _ask(module: nn.Module, record: ExpertsRecord, backend: str) -> tuple[str | None, str | None]:
    """Return the backend that the oracle picks for a quantised module, or its reason."""
    from .quantization import problem_of

    scheme = record.scheme
    w2 = getattr(module, record.structure.w2_name)
    if w2.device.type == "meta":
        return None, NO_DATA
    problem = problem_of(module, record, w2)
    try:
        choice = select_int8_moe_backend(
            problem, scheme.weight_key, scheme.activation_key, backend, w2.device
        )
    except (NotImplementedError, ValueError) as error:
        return None, str(error)
    return choice.backend, None


def _compile(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], backend: str
) -> list[Outcome]:
    """Capture the graphs of one call and return what the pass did with them."""
    from torch._inductor import config

    from . import passes
    from .passes.capture import capture_backend
    from .passes.joint import ExpertsPass

    before = passes.without_ours(config.joint_custom_pre_pass)
    experts_pass = ExpertsPass(backend, before, raises=False)
    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend=capture_backend(experts_pass))(*args, **kwargs)
    finally:
        torch.compiler.reset()
    return experts_pass.outcomes


def _with_outcome(layer: Layer, outcomes: Sequence[Outcome]) -> Layer:
    """Correct what the module says by what the pass did; one refusal outweighs a rewrite.

    Graphs that break inside a layer do not know its name.
    """
    if layer.scheme is None:
        return layer
    named = [outcome for outcome in outcomes if outcome.name == layer.name]
    nameless = [outcome for outcome in outcomes if not outcome.name]
    mine = sorted(named or nameless, key=lambda outcome: outcome.rewritten)
    if not mine:
        return replace(layer, accepted=False, backend=None, reason=layer.reason or NOT_SEEN)
    first = mine[0]
    return replace(layer, accepted=first.rewritten, backend=first.backend, reason=first.reason)


def _cell(content: object) -> str:
    if content is None:
        return "-"
    if isinstance(content, bool):
        return "yes" if content else "no"
    return f"{content:,}" if isinstance(content, int) else str(content) or "(model)"
