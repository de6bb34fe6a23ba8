"""Find the nodes of a graph that compute one experts call, starting from its weight markers.

Letters: T tokens, K experts per token, E experts, H hidden, I intermediate, N = 2*I gated, else I.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from ..structure import Gate, Layout
from .canonical import Canon, UnknownSizeError, bound_arguments, is_size, value
from .matcher import Binding, Matcher
from .patterns import (
    IMPLEMENTATIONS,
    Literals,
    Problem,
    Spelling,
    frame_pattern,
    gate_pattern,
    spellings,
)

aten = torch.ops.aten

# Dynamo writes L['self'].model.layers.0, export L['self']... or mod.model.layers.0.
_ROOT = re.compile(r"^(L\['\w+'\]|self|mod)(?=[.\[]|$)")
_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
# A region has 20 to 60 nodes; a walk that leaves it need not go on through the model.
_NEAR = 400
# Transposed or not, gate and up alternating or not; those that models have first.
LAYOUTS = ((False, False), (True, True), (True, False), (False, True))
_LOOP = (
    "the experts run as a Python loop: set_experts_implementation('grouped_mm') or 'batched_mm' "
    "first"
)


@dataclass(frozen=True)
class Region:
    """One experts call in a graph: its inputs by role, its result, and how it is written."""

    name: str
    leaves: Mapping[str, fx.Node]
    output: fx.Node
    implementation: str
    layout: Layout
    problem: Problem
    spelling: Spelling
    literals: Literals
    canon: Canon = field(repr=False)

    @property
    def gate(self) -> Gate:
        """Return the gate as the operator's arguments."""
        return self.spelling.gate(self.literals)


@dataclass(frozen=True)
class Unmatched:
    """A marked weight that no known experts call explains, and why."""

    name: str
    marker: fx.Node
    reason: str


def is_marker(node: fx.Node) -> bool:
    """Say whether a node is int8moe.dequantize."""
    return node.op == "call_function" and node.target is torch.ops.int8moe.dequantize.default


def layer_name(node: fx.Node) -> str:
    """Return the dotted name of the module that a node was traced in, "" for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(iter(reversed(stack.values())))[0]) if stack else ""
    inside = _ROOT.sub("", path).replace("._modules", "")
    return _INDEX.sub(r".\1", inside).strip(".")


def find_regions(graph: fx.Graph) -> list[Region | Unmatched]:
    """Explain every marker of a graph: as a weight of a region, or by a reason why not."""
    markers = [node for node in graph.nodes if is_marker(node)]
    order = {node: index for index, node in enumerate(graph.nodes)}
    canon = Canon(graph)
    found: list[Region | Unmatched] = []
    explained: set[fx.Node] = set()
    misses: dict[fx.Node, _Miss] = {}
    for marker in markers:
        if marker in explained:
            continue
        try:
            result: Region | _Miss = _Search(marker, markers, order, canon).run()
        except UnknownSizeError as error:
            result = _Miss(str(error))
        except Exception as error:
            # Hugging Face's code is traced to compare with it, and may raise anything.
            result = _Miss(failure(error))
        if isinstance(result, Region):
            found.append(result)
            explained.update((result.leaves["w13"], result.leaves["w2"]))
        else:
            misses[marker] = result
    found.extend(_group_misses(misses, explained))
    return found


def failure(error: Exception) -> str:
    """State as a reason that the comparison itself failed."""
    return f"comparing it with Hugging Face's forward failed: {type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Miss:
    """Why a marker does not look like the w2 of a call; progress says how alike it was."""

    reason: str
    progress: int = -1


def _group_misses(misses: Mapping[fx.Node, _Miss], explained: set[fx.Node]) -> list[Unmatched]:
    """Report the unexplained markers of a layer once, by the reason that came closest."""
    by_layer: dict[str, list[fx.Node]] = {}
    for marker in misses:
        if marker not in explained:
            by_layer.setdefault(layer_name(marker), []).append(marker)
    return [
        Unmatched(name, best, misses[best].reason)
        for name, markers in by_layer.items()
        for best in [max(markers, key=lambda marker: misses[marker].progress)]
    ]


class _Search:
    """Try to read one marker as the w2 of an experts call."""

    def __init__(
        self,
        marker: fx.Node,
        markers: list[fx.Node],
        order: Mapping[fx.Node, int],
        canon: Canon,
    ) -> None:
        self._marker = marker
        self._order = order
        self._canon = canon
        self._shape = canon.sizes.shape(value(marker))
        self._rows = {
            shape[1]
            for shape in (canon.sizes.shape(value(other)) for other in markers)
            if (shape[0], shape[2]) == self._shape[:2]
        }
        self._miss = _Miss("no other weight of the graph fits it as gate_up_proj or up_proj")

    def run(self) -> Region | _Miss:
        """Return the region, or the reason of the attempt that came furthest."""
        total = self._first_sum()
        if total is None:
            return _Miss(_LOOP, -2)
        if not self._rows & {self._shape[2], 2 * self._shape[2]}:
            return self._miss
        for attempt in self._attempts(total):
            region = self._try(*attempt)
            if region is not None:
                return region
        return self._miss

    def _first_sum(self) -> fx.Node | None:
        """Walk forward to the sum over slots: [T,K,H] over dimension 1."""
        queue = [(self._order[self._marker], self._marker)]
        seen = {self._marker}
        while queue and len(seen) < _NEAR:
            _, node = heapq.heappop(queue)
            if self._sums_slots(node):
                return node
            for user in node.users:
                if user not in seen and not is_size(user):
                    seen.add(user)
                    heapq.heappush(queue, (self._order[user], user))
        return None

    def _sums_slots(self, node: fx.Node) -> bool:
        if node.target is not aten.sum.dim_IntList or not isinstance(value(node), Tensor):
            return False
        arguments = dict(bound_arguments(node))
        slots = value(arguments["self"])
        if not isinstance(slots, Tensor) or list(arguments["dim"] or ()) != [1]:
            return False
        return slots.dim() == 3 and self._canon.sizes.number(slots.shape[2]) == self._shape[1]

    def _attempts(self, total: fx.Node) -> Iterator[tuple[fx.Node, str, Layout, Problem]]:
        """List what the call may be, by what kinds of tensors are near it."""
        slots = dict(bound_arguments(total))["self"]
        assert isinstance(slots, fx.Node), "a sum has a tensor to sum"
        tokens, top_k, _ = self._canon.sizes.shape(value(slots))
        near = _tensors_before(total)
        experts, hidden, intermediate = self._shape
        floats, ids = self._dtypes(near, (tokens, top_k))
        biases, _ = self._dtypes(near, (experts, hidden))
        weight_dtype = value(self._marker).dtype
        for output, name, router_dtype, id_dtype, gated, bias_dtype in itertools.product(
            (*filter(_is_cast, total.users), total),
            [name for name in IMPLEMENTATIONS if _products(name, near)],
            floats,
            ids,
            [gated for gated in (True, False) if (1 + gated) * intermediate in self._rows],
            (*biases, None),
        ):
            problem = Problem(
                tokens=tokens,
                top_k=top_k,
                experts=experts,
                hidden=hidden,
                intermediate=intermediate,
                gated=gated,
                device=value(self._marker).device,
                weight_dtype=weight_dtype,
                hidden_dtype=value(output).dtype,
                router_dtype=router_dtype,
                bias_dtype=bias_dtype or weight_dtype,
                product_dtype=weight_dtype,
                gated_dtype=weight_dtype,
                id_dtype=id_dtype,
            )
            contexts = _contexts(problem, _products(name, near), name, widens=_widens(total))
            for in_context in contexts:
                for transposed, interleaved in LAYOUTS:
                    layout = Layout(transposed, interleaved, bias_dtype is not None)
                    yield output, name, layout, in_context

    def _dtypes(
        self, nodes: Iterable[fx.Node], shape: tuple[int, int]
    ) -> tuple[list[torch.dtype], list[torch.dtype]]:
        """List the floating and the index dtypes of the tensors of a shape."""
        dtypes = [
            value(node).dtype for node in nodes if self._canon.sizes.shape(value(node)) == shape
        ]
        different = list(dict.fromkeys(dtypes))
        return (
            [dtype for dtype in different if dtype.is_floating_point],
            [dtype for dtype in different if dtype in (torch.int64, torch.int32)],
        )

    def _try(
        self, output: fx.Node, implementation: str, layout: Layout, problem: Problem
    ) -> Region | None:
        """Match the call around its gate, then the gate, then what enters the gate."""
        try:
            frame = frame_pattern(implementation, layout, problem)
        except Exception as error:
            # Hugging Face's code cannot run on such tensors, so that it did not trace this graph.
            self._keep(f"{implementation} does not run on them: {error}", 0)
            return None
        around = Matcher(frame, self._canon)
        if not around.match(frame.outputs[0], output):
            self._keep(_differs(implementation, around.difference), around.progress)
            return None
        gated = around.binding.inputs["gated"]
        closest = _Miss("")
        cast = _is_cast(self._canon.source(gated))
        for spelling in spellings(gated=problem.gated, cast=cast):
            pattern = gate_pattern(spelling, layout.interleaved, problem)
            gate = Matcher(pattern, self._canon)
            if not gate.match(pattern.outputs[0], gated):
                closest = max(closest, _Miss(gate.difference, gate.progress), key=_progress)
                continue
            if around.match(frame.outputs[1], gate.binding.inputs["projected"]):
                return self._region(
                    around.binding, gate.binding, output, implementation, layout, problem, spelling
                )
            self._keep(_differs(implementation, around.difference), 100 + around.progress)
        self._keep(
            f"the activation between the two products is none that the operator has "
            f"({closest.reason})",
            50 + closest.progress,
        )
        return None

    def _region(
        self,
        around: Binding,
        gate: Binding,
        output: fx.Node,
        implementation: str,
        layout: Layout,
        problem: Problem,
        spelling: Spelling,
    ) -> Region | None:
        leaves = {name: node for name, node in around.inputs.items() if name != "gated"}
        if not (is_marker(leaves["w13"]) and is_marker(leaves["w2"])):
            self._keep("only one of the two weights is int8", 200)
            return None
        return Region(
            name=layer_name(leaves["w13"]),
            leaves=leaves,
            output=output,
            implementation=implementation,
            layout=layout,
            problem=problem,
            spelling=spelling,
            literals=gate.literals,
            canon=self._canon,
        )

    def _keep(self, reason: str, progress: int) -> None:
        self._miss = max(self._miss, _Miss(reason, progress), key=_progress)


def _progress(miss: _Miss) -> int:
    return miss.progress


def _differs(implementation: str, difference: str) -> str:
    return f"the graph is not Hugging Face's {implementation} forward: {difference}"


def _products(implementation: str, nodes: Iterable[fx.Node]) -> set[torch.dtype]:
    """Return the dtypes of the products of an implementation among some nodes."""
    word = "aten.bmm." if implementation == "batched_mm" else "grouped_mm"
    return {value(node).dtype for node in nodes if word in str(node.target)}


def _contexts(
    problem: Problem, products: set[torch.dtype], implementation: str, *, widens: bool
) -> list[Problem]:
    """List the problem in the autocast contexts that it may have been traced in, mostly none.

    Without one, products of batched_mm take one dtype only. No autocast knows those of grouped_mm,
    which casts to the weights' dtype. What a gate returns may be fp32 in a GPU's autocast.
    """
    as_weights = problem.weight_dtype in products
    same = as_weights and problem.weight_dtype == problem.hidden_dtype
    grouped = implementation == "grouped_mm"
    found = [problem] if same or (as_weights and grouped) else []
    if same and not widens:
        return found
    for autocast in (torch.bfloat16, torch.float16):
        product = problem.weight_dtype if grouped else autocast
        if product in products:
            found.extend(
                replace(problem, autocast=autocast, product_dtype=product, gated_dtype=gated)
                for gated in dict.fromkeys((product, torch.float32))
            )
        if grouped:
            # The other one traces the same.
            break
    return found


def _widens(total: fx.Node) -> bool:
    """Say whether the sum over slots runs in another dtype than theirs, as under autocast."""
    arguments = dict(bound_arguments(total))
    return arguments["dtype"] is not None or _is_cast(arguments["self"])


def _is_cast(node: fx.Node) -> bool:
    """Say whether a node is a cast whose result is known."""
    is_cast = node.target is torch.ops.prims.convert_element_type.default
    return is_cast and isinstance(value(node), Tensor)


def _tensors_before(output: fx.Node) -> list[fx.Node]:
    """List the nearest tensors that a node is computed from, not looking behind markers."""
    queue, seen = [output], {output}
    for node in queue:
        if len(seen) > _NEAR:
            break
        for operand in () if is_marker(node) else node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                queue.append(operand)
    return [node for node in queue if isinstance(value(node), Tensor)]
