"""Give graph nodes a canonical form, free of names and spelling, and digest expressions of them."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

aten = torch.ops.aten
prims = torch.ops.prims

# Stand in for symbolic sizes: distinct, and unlike the size of any dimension of a real model.
_PRIMES: Final = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087)
_LAST_INDEX: Final = 2**62
_RESHAPES: Final = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
_COPIES: Final = frozenset(
    {aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default}
)
_ADD: Final = str(aten.add.Tensor)
_MUL: Final = str(aten.mul.Tensor)
# Arguments that do not change a value; the device is that of the operands.
_PLACEMENT: Final = frozenset({"device", "layout", "pin_memory", "requires_grad", "memory_format"})


@dataclass(frozen=True)
class Form:
    """State what a node computes: its operation, result dtype and arguments by position.

    Arguments are nodes, plain values and tuples of both.
    """

    operation: str
    dtype: torch.dtype | None
    arguments: tuple[Any, ...]

    @property
    def commutes(self) -> bool:
        """Say whether the first two arguments may change places."""
        if len(self.arguments) < 2 or not isinstance(self.arguments[1], fx.Node):
            return False
        # An addition's third argument scales the second operand only.
        return self.operation == _MUL or (self.operation == _ADD and self.arguments[2] == 1)


def value(node: fx.Node) -> Any:
    """Return the fake value of a node: a tensor, a tuple of them, or a number."""
    return node.meta.get("val")


def is_size(node: fx.Node) -> bool:
    """Say whether a node is arithmetic on sizes and not a tensor."""
    return isinstance(value(node), (int, SymInt, SymBool, SymFloat))


class UnknownSizeError(Exception):
    """A size is not known: its node has no value, or no number fits the symbols' numbers."""


class Sizes:
    """Turn symbolic sizes into numbers, one distinct prime a symbol.

    A symbol whose range ends below its prime takes the largest value of its range that no other
    has. So the same functions trace with and without symbols, and no two symbols agree by
    coincidence unless their ranges leave no choice. One of a short range may agree with a fixed
    size.
    """

    def __init__(self) -> None:
        self._values: dict[Any, sympy.Integer] = {}
        self._primes = itertools.chain(_PRIMES, itertools.count(1091, 2))

    def number(self, size: int | SymInt) -> int:
        """Return the number that stands for a size. Raises UnknownSizeError where there is none."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._values:
                self._values[symbol] = sympy.Integer(self._choose(size, symbol))
        result = sympy.sympify(expression).xreplace(self._values)
        if not result.is_Integer:
            raise UnknownSizeError(f"size {expression} is no whole number for {self._values}")
        return int(result)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Return a tensor's shape as numbers. Raises UnknownSizeError for a node without a value.

        A pass that ran before may have added nodes and recorded nothing.
        """
        if not isinstance(tensor, Tensor):
            raise UnknownSizeError("a node has no recorded value")
        return tuple(self.number(size) for size in tensor.shape)

    def _choose(self, size: SymInt, symbol: Any) -> int:
        prime = next(self._primes)
        allowed = size.node.shape_env.var_to_range.get(symbol)
        if allowed is None or allowed.upper >= prime:
            return prime
        # Sizes 0 and 1 trace differently from all others.
        lowest = int(max(allowed.lower, 2))
        candidates = range(int(allowed.upper), lowest - 1, -1)
        taken = {int(number) for number in self._values.values()}
        return next((n for n in candidates if n not in taken), int(allowed.upper))


class Canon:
    """Know the canonical forms of the nodes of one graph.

    Nodes that compute the same expression have one source: copies and reshapes that change
    nothing lead back to it, and so do repetitions (functionalisation repeats views).
    """

    def __init__(self, graph: fx.Graph, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or Sizes()
        self._forms: dict[fx.Node, Form] = {}
        self._sources: dict[fx.Node, fx.Node] = {}
        first: dict[Form, fx.Node] = {}
        for node in graph.nodes:
            try:
                self._sources[node] = self._trace_back(node, first)
            except UnknownSizeError as error:
                self._forms[node] = Form(str(error), None, ())
                self._sources[node] = node

    def _trace_back(self, node: fx.Node, first: dict[Form, fx.Node]) -> fx.Node:
        before = self._unchanged_operand(node)
        if before is not None:
            return self.source(before)
        if node.op != "call_function" or is_size(node):
            return node
        self._forms[node] = form = self._compute(node)
        return node if _may_differ(node.target) else first.setdefault(form, node)

    def source(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for everything with this node's value."""
        return self._sources[node]

    def form(self, node: fx.Node) -> Form:
        """Return the form of a node that calls a function; its operands are sources."""
        return self._forms[node]

    def _unchanged_operand(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        operand, mine = node.args[0], value(node)
        theirs = value(operand)
        if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
            return None
        if mine.dtype != theirs.dtype or mine.dim() != theirs.dim():
            return None
        if node.target in _COPIES or node.target is prims.convert_element_type.default:
            return operand
        if node.target in _RESHAPES or node.target is aten.slice.Tensor:
            step = node.args[4] if len(node.args) > 4 else 1
            same = self.sizes.shape(mine) == self.sizes.shape(theirs)
            return operand if same and step == 1 else None
        return None

    def _compute(self, node: fx.Node) -> Form:
        result = value(node)
        dtype = result.dtype if isinstance(result, Tensor) else None
        if node.target in _RESHAPES:
            operand = dict(bound_arguments(node))["self"]
            return Form("view", dtype, (self._plain(operand), self.sizes.shape(result)))
        if node.target is aten.slice.Tensor:
            return self._slice(node, dtype)
        if node.target is operator.getitem:
            return self._item(node, dtype)
        if isinstance(node.target, torch._ops.OpOverload):
            given = tuple(
                self._plain(argument)
                for name, argument in bound_arguments(node)
                if name not in _PLACEMENT
            )
            return Form(str(node.target), dtype, given)
        rest = tuple(self._plain(argument) for argument in (*node.args, *node.kwargs.values()))
        return Form(str(node.target), dtype, rest)

    def _slice(self, node: fx.Node, dtype: torch.dtype | None) -> Form:
        arguments = dict(bound_arguments(node))
        operand = arguments["self"]
        shape = self.sizes.shape(value(operand))
        dim = self._plain(arguments["dim"]) % len(shape)
        start = self._plain(arguments["start"]) or 0
        end = self._plain(arguments["end"])
        end = _LAST_INDEX if end is None else end
        bounds = slice(start, end).indices(shape[dim])[:2]
        step = self._plain(arguments["step"])
        return Form("slice", dtype, (self._plain(operand), dim, *bounds, step))

    def _item(self, node: fx.Node, dtype: torch.dtype | None) -> Form:
        whole, index = node.args
        if isinstance(whole, fx.Node) and whole.target is aten.split.Tensor:
            arguments = dict(bound_arguments(whole))
            operand = arguments["self"]
            shape = self.sizes.shape(value(operand))
            dim = self._plain(arguments["dim"]) % len(shape)
            length = self._plain(arguments["split_size"])
            assert isinstance(index, int), "a split is indexed by a number"
            end = min((index + 1) * length, shape[dim])
            return Form("slice", dtype, (self._plain(operand), dim, index * length, end, 1))
        return Form("getitem", dtype, (self._plain(whole), index))

    def _plain(self, argument: Any) -> Any:
        """Replace nodes by sources, sizes by numbers, lists by tuples; 1.0 is the number 1."""
        if isinstance(argument, fx.Node):
            return self._plain(value(argument)) if is_size(argument) else self.source(argument)
        if isinstance(argument, (list, tuple)):
            return tuple(self._plain(entry) for entry in argument)
        if isinstance(argument, SymInt):
            return self.sizes.number(argument)
        if isinstance(argument, float) and argument.is_integer():
            return int(argument)
        return argument


def _may_differ(target: Any) -> bool:
    """Say whether two calls with the same arguments may give different values."""
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable


def bound_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Pair the arguments of an operator call with their names, defaults filled in."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), "only operators have a schema"
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            yield argument.name, node.args[position]
        else:
            default = argument.default_value if argument.has_default_value() else None
            yield argument.name, node.kwargs.get(argument.name, default)


def digest(output: fx.Node, leaves: Mapping[fx.Node, str], canon: Canon) -> str:
    """Hash the expression that computes a node from the leaves, whatever the names and order.

    Equal digests mean equal expressions: each node is hashed from its form with its operands'
    digests in place of the operands, so shared parts are hashed once.
    """
    memo: dict[fx.Node, str] = {}

    def hashed(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return memo[argument]
        if isinstance(argument, tuple):
            return tuple(hashed(entry) for entry in argument)
        return argument

    for node in postorder(output, leaves, canon):
        if node in leaves:
            content: Any = ("leaf", leaves[node])
        elif node.op != "call_function":
            content = ("foreign", node.name)
        else:
            form = canon.form(node)
            arguments = [hashed(argument) for argument in form.arguments]
            if form.commutes:
                arguments[:2] = sorted(arguments[:2], key=str)
            content = (form.operation, str(form.dtype), repr(arguments))
        memo[node] = hashlib.sha256(repr(content).encode()).hexdigest()
    return memo[canon.source(output)]


def postorder(output: fx.Node, leaves: Mapping[fx.Node, str], canon: Canon) -> Iterable[fx.Node]:
    """List the nodes of an expression, operands first, copies skipped, leaves included.

    Leaves are nodes that compute, not copies of one (see Canon.source).
    """
    done: dict[fx.Node, None] = {}
    stack: list[tuple[fx.Node, bool]] = [(canon.source(output), False)]
    while stack:
        node, expanded = stack.pop()
        if node in done:
            continue
        if expanded or node in leaves or node.op != "call_function":
            done[node] = None
            continue
        stack.append((node, True))
        for operand in operands(canon.form(node).arguments):
            stack.append((operand, False))
    return done


def operands(arguments: tuple[Any, ...]) -> Iterator[fx.Node]:
    """List the nodes among canonical arguments, also those inside tuples."""
    for argument in arguments:
        if isinstance(argument, fx.Node):
            yield argument
        elif isinstance(argument, tuple):
            yield from operands(argument)


def text(
    output: fx.Node, leaves: Mapping[fx.Node, str], canon: Canon, rename: Callable[[str], str] = str
) -> str:
    """Write an expression one operation a line, numbered from the leaves: for people and tests."""
    names: dict[fx.Node, str] = {}
    lines: list[str] = []

    def written(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return names[argument]
        if isinstance(argument, tuple):
            return "[" + ", ".join(written(entry) for entry in argument) + "]"
        return str(argument)

    for node in postorder(output, leaves, canon):
        if node in leaves:
            names[node] = leaves[node]
        elif node.op != "call_function":
            names[node] = node.name
        else:
            form = canon.form(node)
            names[node] = f"%{len(lines)}"
            inside = ", ".join(written(argument) for argument in form.arguments)
            lines.append(f"{names[node]} = {rename(form.operation)}({inside})")
    return "\n".join(lines)
