"""Run models as far as Inductor's joint graph and look at what the graph pass made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from int8moe_compile.passes.capture import capture_backend
from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.passes.outcome import Outcome

EXPERTS = torch.ops.int8moe.experts.default
MARKER = torch.ops.int8moe.dequantize.default


@dataclass
class Captured:
    """What one compiled call returned, its graphs behind the joint passes, and the outcomes."""

    result: Any
    graphs: list[fx.GraphModule] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def calls(self, target: Any = EXPERTS) -> list[fx.Node]:
        return [
            node for graph in self.graphs for node in graph.graph.nodes if node.target is target
        ]

    @property
    def operators(self) -> set[str]:
        return {str(node.target) for graph in self.graphs for node in graph.graph.nodes}

    @property
    def reasons(self) -> list[str | None]:
        return [outcome.reason for outcome in self.outcomes]


def run(
    function: Any,
    *args: Any,
    dynamic: bool | None = False,
    experts_pass: ExpertsPass | None = None,
    fullgraph: bool = True,
    grad: bool = False,
    **kwargs: Any,
) -> Captured:
    """Compile a model or function up to the joint graph, with the pass, and call it once."""
    experts_pass = experts_pass or ExpertsPass()
    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    backend = capture_backend(experts_pass, graphs.append)
    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    with torch.set_grad_enabled(grad):
        result = compiled(*args, **kwargs)
    return Captured(result, graphs, experts_pass.outcomes)
