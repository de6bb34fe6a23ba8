"""Find numbers of a gate that a graph takes as inputs: what it equals depends on their values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from .canonical import value
from .region import layer_name


def hidden_number(graph: fx.Graph, layers: Iterable[str]) -> Tensor | None:
    """Return a float input that tensors in one of the layers are computed with, None without one.

    Under ``dynamic=True`` Dynamo makes the floats of modules and globals (math.pi, for one) 0-d
    fp64 inputs.
    """
    names = tuple(layers)
    numbers: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        result = value(node)
        if not isinstance(result, Tensor):
            continue
        if node.op == "placeholder":
            if result.dim() == 0 and result.dtype == torch.float64:
                numbers[node] = result
            continue
        used = next((numbers[each] for each in node.all_input_nodes if each in numbers), None)
        if used is None:
            continue
        if result.dim() == 0:
            numbers[node] = used
        elif _is_near(node, names):
            return used
    return None


def _is_near(node: fx.Node, names: tuple[str, ...]) -> bool:
    """Say whether a node or a neighbour was traced in a layer; a new node has no record itself."""
    around = (node, *node.all_input_nodes, *node.users)
    traced = [layer_name(each) for each in around]
    return any(
        not name or each == name or each.startswith(f"{name}.") for name in names for each in traced
    )
