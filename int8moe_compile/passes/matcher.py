"""Match a graph against a traced pattern from the result backwards, binding inputs and literals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .canonical import Canon, Form, value
from .patterns import STAND_INS, Literals, Pattern

_STAND_INS = {
    sign * number: (name, sign) for name, number in vars(STAND_INS).items() for sign in (1, -1)
}


@dataclass
class Binding:
    """Hold what a pattern's inputs and stand-in numbers mean in the graph."""

    inputs: dict[str, fx.Node] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def literals(self) -> Literals:
        """Return the numbers found; those that the pattern lacks keep their stand-ins."""
        return Literals(**self.numbers)

    def copy(self) -> Binding:
        """Return an independent copy."""
        return Binding(dict(self.inputs), dict(self.numbers))


class Matcher:
    """Unify one pattern with one graph.

    The operations must be the same in the same order; the operands of an addition or product may
    change places. After a failure ``difference`` says where the two part furthest from the result.
    """

    def __init__(self, pattern: Pattern, graph: Canon, binding: Binding | None = None) -> None:
        self.binding = binding or Binding()
        self.difference = "nothing was compared"
        self._pattern = Canon(pattern.outputs[0].graph)
        self._names = {self._pattern.source(node): name for node, name in pattern.inputs.items()}
        self._graph = graph
        self._pairs: dict[fx.Node, fx.Node] = {}
        self._furthest = -1

    def match(self, pattern: fx.Node, graph: fx.Node) -> bool:
        """Say whether a node computes what the pattern's node does; binds on success only."""
        saved, pairs = self.binding.copy(), dict(self._pairs)
        if self._nodes(pattern, graph):
            return True
        self.binding.inputs, self.binding.numbers = saved.inputs, saved.numbers
        self._pairs = pairs
        return False

    def _nodes(self, pattern: fx.Node, graph: fx.Node) -> bool:
        pattern, graph = self._pattern.source(pattern), self._graph.source(graph)
        if self._pairs.get(pattern) is graph:
            return True
        name = self._names.get(pattern)
        if name is not None:
            return self._input(name, pattern, graph)
        if graph.op != "call_function":
            return self._differ(
                f"{graph.name} where {self._pattern.form(pattern).operation} stands"
            )
        wanted, got = self._pattern.form(pattern), self._graph.form(graph)
        if (wanted.operation, wanted.dtype) != (got.operation, got.dtype):
            return self._differ(f"{_shown(got)} where {_shown(wanted)} stands")
        if not self._operands(wanted, got):
            return False
        self._pairs[pattern] = graph
        return True

    def _operands(self, wanted: Form, got: Form) -> bool:
        left, right = wanted.arguments, got.arguments
        if not (wanted.commutes and got.commutes):
            return self._arguments(left, right)
        saved, pairs = self.binding.copy(), dict(self._pairs)
        if self._arguments(left, right):
            return True
        self.binding.inputs, self.binding.numbers = saved.inputs, saved.numbers
        self._pairs = pairs
        return self._arguments(left, (right[1], right[0], *right[2:]))

    def _arguments(self, wanted: tuple[Any, ...], got: tuple[Any, ...]) -> bool:
        if len(wanted) != len(got):
            return self._differ(f"{len(got)} arguments where {len(wanted)} stand")
        return all(self._argument(a, b) for a, b in zip(wanted, got, strict=True))

    def _argument(self, wanted: Any, got: Any) -> bool:
        if isinstance(wanted, fx.Node) and isinstance(got, fx.Node):
            return self._nodes(wanted, got)
        if isinstance(wanted, tuple) and isinstance(got, tuple):
            return self._arguments(wanted, got)
        if isinstance(wanted, float) and wanted in _STAND_INS:
            return self._number(*_STAND_INS[wanted], got)
        if isinstance(wanted, fx.Node) or isinstance(got, fx.Node) or wanted != got:
            return self._differ(f"argument {got} where {wanted} stands")
        return True

    def _number(self, name: str, sign: int, got: Any) -> bool:
        if isinstance(got, bool) or not isinstance(got, (int, float)):
            return self._differ(f"{got} where the number {name} stands")
        found = float(sign * got)
        if self.binding.numbers.setdefault(name, found) != found:
            return self._differ(f"{found} where {name} is {self.binding.numbers[name]}")
        return True

    def _input(self, name: str, pattern: fx.Node, graph: fx.Node) -> bool:
        wanted, got = value(pattern), value(graph)
        if not isinstance(got, Tensor):
            return self._differ(f"{graph.name} is no tensor where {name} stands")
        shape = self._graph.sizes.shape(got)
        if (tuple(wanted.shape), wanted.dtype) != (shape, got.dtype):
            return self._differ(
                f"{name} is {_short(got.dtype)}{list(shape)} where "
                f"{_short(wanted.dtype)}{list(wanted.shape)} stands"
            )
        if self.binding.inputs.setdefault(name, graph) is not graph:
            return self._differ(f"{name} is two tensors")
        self._pairs[pattern] = graph
        return True

    def _differ(self, difference: str) -> bool:
        if len(self._pairs) > self._furthest:
            self._furthest = len(self._pairs)
            self.difference = difference
        return False

    @property
    def progress(self) -> int:
        """Return how many nodes agreed before the difference."""
        return max(self._furthest, len(self._pairs))


def _shown(form: Form) -> str:
    return form.operation if form.dtype is None else f"{form.operation} ({_short(form.dtype)})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
