"""Decide whether a region may become one int8moe.experts call, by which backend, or why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..oracle import MoeProblem, select_int8_moe_backend
from ..schemes import ACTIVATION_WORDS, INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR, QuantKey
from .canonical import Canon, bound_arguments, digest, is_size, value
from .patterns import full_pattern
from .region import Region, is_marker


class RefusedError(Exception):
    """Leave the region alone; the message is the reason that is kept."""


class NamedBackendError(Exception):
    """The backend that the user named cannot run the region."""


@dataclass(frozen=True)
class Accepted:
    """A region that may be rewritten, the nodes that it replaces, and the backend that runs it."""

    region: Region
    inner: tuple[fx.Node, ...]
    backend: str


def check_region(region: Region, backend: str, order: Mapping[fx.Node, int]) -> Accepted:
    """Accept a region of an unchanged graph. Raises RefusedError with the reason if it may not be.

    Raises NamedBackendError if a backend was named and cannot run it.
    """
    for name, leaf in region.leaves.items():
        if not isinstance(value(leaf), Tensor):
            raise RefusedError(f"{leaf.name}, its {name}, has no recorded value")
    inner = inner_nodes(region)
    _check_users(region, inner, order)
    _check_mutations(region, inner, order)
    _check_same_expression(region)
    return Accepted(region, tuple(inner), _choose_backend(region, backend))


def marker_arguments(marker: fx.Node) -> dict[str, object]:
    """Return the arguments of an int8moe.dequantize call by name."""
    return dict(bound_arguments(marker))


def inner_nodes(region: Region) -> dict[fx.Node, None]:
    """List the nodes of a region between its leaves and its output, the output included."""
    leaves = set(region.leaves.values())
    found: dict[fx.Node, None] = {region.output: None}
    queue = [region.output]
    for node in queue:
        for operand in node.all_input_nodes:
            # A copy or a repetition of a leaf is as good as the leaf.
            is_leaf = region.canon.source(operand) in leaves
            if not is_leaf and operand not in found and not is_size(operand):
                found[operand] = None
                queue.append(operand)
    return found


def is_metadata_assertion(node: fx.Node) -> bool:
    """Say whether a node only asserts dtype, device and layout, as torch.export adds to casts."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def _check_users(region: Region, inner: dict[fx.Node, None], order: Mapping[fx.Node, int]) -> None:
    """Refuse a region whose results on the way are used outside it: they would be computed twice.

    Only what depends on the weights counts: the sorted ids, for one, may be used elsewhere.
    """
    depends: list[fx.Node] = []
    for node in sorted(inner, key=order.__getitem__):
        if any(operand in depends or is_marker(operand) for operand in node.all_input_nodes):
            depends.append(node)
    depends.remove(region.output)
    for node in depends:
        for user in node.users:
            if user not in inner and not is_metadata_assertion(user):
                what = "read for its size" if is_size(user) else "used"
                raise RefusedError(
                    f"{node.name} inside the experts is also {what} by {user.name} outside"
                )


def _check_mutations(
    region: Region, inner: dict[fx.Node, None], order: Mapping[fx.Node, int]
) -> None:
    """Refuse a region that something writes into while it is computed."""
    first = min(order[node] for node in inner)
    touched = {*inner, *region.leaves.values()}
    for node, index in order.items():
        if first < index < order[region.output]:
            for written in _written_operands(node):
                if written in touched:
                    raise RefusedError(f"{node.name} writes into {written.name} in between")


def _written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """List the tensors that an operator call changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    for argument, (_, given) in zip(
        node.target._schema.arguments, bound_arguments(node), strict=True
    ):
        if argument.is_write:
            yield from (given,) if isinstance(given, fx.Node) else ()


def _check_same_expression(region: Region) -> None:
    """Refuse a region that is not, operation by operation, what Hugging Face's forward computes."""
    wanted = full_pattern(
        region.implementation, region.layout, region.problem, region.spelling, region.literals
    )
    (output,) = wanted.outputs
    names = {node: name for name, node in region.leaves.items()}
    if digest(region.output, names, region.canon) != digest(
        output, wanted.inputs, Canon(output.graph)
    ):
        raise RefusedError(f"its expression is not that of {region.implementation}")


def _choose_backend(region: Region, backend: str) -> str:
    """Ask the oracle. The refusal of a named backend is for the user, that of all a reason."""
    w13, w2 = (marker_arguments(region.leaves[which]) for which in ("w13", "w2"))
    words = {str(w13["activation_quant"]), str(w2["activation_quant"])}
    if len(words) != 1:
        raise RefusedError(f"its weights want different activation_quant: {sorted(words)}")
    problem, (word,) = region.problem, words
    asked = MoeProblem(
        num_experts=problem.experts,
        top_k=_known_size(value(region.leaves["topk_ids"]), 1, problem.top_k),
        hidden_size=problem.hidden,
        intermediate_size=problem.intermediate,
        dtype=problem.hidden_dtype,
        gated=region.gate.gated,
        activation=region.gate.activation,
        has_bias=region.layout.has_bias,
    )
    keys = {kind: key for key, kind in ACTIVATION_WORDS.items()}
    try:
        choice = select_int8_moe_backend(
            asked, _weight_key(w13, w2), keys[word], backend, problem.device
        )
    except NotImplementedError as error:
        raise RefusedError(str(error)) from error
    except ValueError as error:
        raise NamedBackendError(str(error)) from error
    return choice.backend


def _weight_key(*markers: dict[str, object]) -> QuantKey:
    """Read the granularity off the scales: [E,1] and [E,2] are per tensor, [E,N] per channel."""
    for arguments in markers:
        codes, scale = arguments["codes"], arguments["scale"]
        assert isinstance(codes, fx.Node) and isinstance(scale, fx.Node), "markers take tensors"
        if value(scale).shape[1] == value(codes).shape[1]:
            return INT8_STATIC_CHANNEL
    return INT8_STATIC_TENSOR


def _known_size(tensor: Tensor, dim: int, otherwise: int) -> int:
    """Return a size, by its example where it is symbolic."""
    size = tensor.shape[dim]
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else otherwise
