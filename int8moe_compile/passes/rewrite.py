"""Replace a checked region by one call of int8moe.experts, or of a named backend's operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ..ops.register import operator_of
from . import AUTO
from .canonical import value
from .checks import (
    Accepted,
    NamedBackendError,
    RefusedError,
    is_metadata_assertion,
    marker_arguments,
)
from .region import Region, is_marker

_KEPT_META = ("nn_module_stack", "stack_trace", "original_aten", "from_node", "seq_nr", "source_fn")


@dataclass
class Rewriter:
    """Rewrite the accepted regions of one graph, which may feed each other."""

    graph: fx.Graph
    calls: dict[fx.Node, fx.Node] = field(default_factory=dict)
    replaced: set[fx.Node] = field(default_factory=set)

    def rewrite(self, accepted: Accepted) -> None:
        """Put the operator in the place of a region's output.

        Raises RefusedError, with the graph unchanged, if the operator does not take the arguments,
        or NamedBackendError if int8moe::experts might, but not a backend's own operator.
        """
        output = accepted.region.output
        args, kwargs = self._arguments(accepted.region)
        operator = operator_of(accepted.backend)
        described = _describe(operator, args, kwargs, value(output))
        with self.graph.inserting_before(output):
            call = self.graph.call_function(operator, args, kwargs)
        call.meta.update({key: output.meta[key] for key in _KEPT_META if key in output.meta})
        call.meta["val"] = described
        output.replace_all_uses_with(call)
        self.calls[output] = call
        self.replaced.update(accepted.inner)

    def finish(self) -> None:
        """Erase replaced nodes and markers that nothing uses any more."""
        for node in reversed(list(self.graph.nodes)):
            asserted = is_metadata_assertion(node) and node.args[0] in self.replaced
            if (node in self.replaced or is_marker(node) or asserted) and not node.users:
                self.graph.erase_node(node)

    def _arguments(self, region: Region) -> tuple[tuple[fx.Node, ...], dict[str, Any]]:
        # A leaf may be the output of a region that is a call by now.
        leaves = {name: self.calls.get(node, node) for name, node in region.leaves.items()}
        gate = region.gate
        w13, w2 = (marker_arguments(leaves[which]) for which in ("w13", "w2"))
        args: Any = (
            leaves["hidden_states"],
            w13["codes"],
            w13["scale"],
            w2["codes"],
            w2["scale"],
            leaves["topk_weights"],
            leaves["topk_ids"],
        )
        given = {
            "activation_quant": w13["activation_quant"],
            "a13_scale": w13["a_scale"],
            "a2_scale": w2["a_scale"],
            "w13_bias": leaves.get("w13_bias"),
            "w2_bias": leaves.get("w2_bias"),
            "activation": gate.activation,
            "alpha": gate.alpha,
            "beta": gate.beta,
            "limit": gate.limit,
            "gated": gate.gated,
        }
        return args, {name: argument for name, argument in given.items() if argument is not None}


def _describe(
    operator: torch._ops.OpOverload, args: tuple[fx.Node, ...], kwargs: dict[str, Any], like: Any
) -> Any:
    """Return the fake result of the call, which must be what the region computed."""
    fakes = [value(node) for node in args]
    options = {k: value(v) if isinstance(v, fx.Node) else v for k, v in kwargs.items()}
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    try:
        with mode:
            result = operator(*fakes, **options)
    except ValueError as error:
        kind = RefusedError if operator is operator_of(AUTO) else NamedBackendError
        raise kind(f"{operator.name()} does not take it: {error}") from error
    if (result.dtype, result.dim(), result.device) != (like.dtype, like.dim(), like.device):
        raise RefusedError(f"{operator.name()} gives {result.dtype}, the graph {like.dtype}")
    return result
