"""Canonical forms and digests: names and spelling do not matter, everything else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from int8moe_compile.compat import trace_functional
from int8moe_compile.passes.canonical import Canon, Sizes, UnknownSizeError, digest, text, value

SHAPE = (6, 8)


def traced(
    function: Callable[..., Any], inputs: int = 2, dtype: torch.dtype = torch.float32
) -> str:
    """Trace a function of equal inputs and return the digest of its result."""
    return digest(*_parts(function, inputs, dtype))


def _parts(
    function: Callable[..., Any], inputs: int, dtype: torch.dtype
) -> tuple[fx.Node, dict[fx.Node, str], Canon]:
    graph = trace_functional(function, [(SHAPE, dtype)] * inputs, torch.device("cpu")).graph
    nodes = list(graph.nodes)
    leaves = {node: f"in{i}" for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
    return nodes[-1].args[0], leaves, Canon(graph)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda a, b: a * b, lambda a, b: b * a),
        (lambda a, b: a + b, lambda a, b: b + a),
        (lambda a, b: a.view(-1), lambda a, b: a.reshape(48)),
        (lambda a, b: a.unsqueeze(1), lambda a, b: a.view(6, 1, 8)),
        (lambda a, b: a.view(2, 3, 8)[0], lambda a, b: a.view(2, 3, 8)[0].view(3, 8).clone()),
        (lambda a, b: a.chunk(2, -1)[1], lambda a, b: a[..., 4:]),
        (lambda a, b: a.chunk(2, -1)[0], lambda a, b: a[:, :4]),
        (lambda a, b: a[:], lambda a, b: a.float().contiguous()),
        (lambda a, b: a.sum(1), lambda a, b: a.sum(dim=[1], keepdim=False)),
        (lambda a, b: a * 2, lambda a, b: a * 2.0),
        (lambda a, b: (a * b).exp() + (a * b), lambda a, b: (c := a * b) + c.exp()),
    ],
)
def test_spelling_does_not_matter(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert traced(one) == traced(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda a, b: a - b, lambda a, b: b - a),
        (lambda a, b: torch.add(a, b, alpha=2), lambda a, b: torch.add(b, a, alpha=2)),
        (lambda a, b: a * b, lambda a, b: a * a),
        (lambda a, b: a.chunk(2, -1)[1], lambda a, b: a.chunk(2, -1)[0]),
        (lambda a, b: a[:, ::2], lambda a, b: a[:, :4]),
        (lambda a, b: a.clamp(max=7.0), lambda a, b: a.clamp(max=7.5)),
        (lambda a, b: a.sum(1), lambda a, b: a.sum(0)),
        (lambda a, b: a.view(8, 6), lambda a, b: a.t()),
        (lambda a, b: a.bfloat16().float(), lambda a, b: a),
        (
            lambda a, b: nn.functional.gelu(a),
            lambda a, b: nn.functional.gelu(a, approximate="tanh"),
        ),
    ],
)
def test_everything_else_matters(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert traced(one) != traced(other)


def test_the_dtype_matters() -> None:
    assert traced(lambda a, b: a * b) != traced(lambda a, b: a * b, dtype=torch.bfloat16)


def test_random_numbers_are_never_the_same() -> None:
    def twice(a: Tensor, b: Tensor) -> Tensor:
        return torch.rand_like(a) - torch.rand_like(a)

    output, _, canon = _parts(twice, 2, torch.float32)
    first, second = canon.form(canon.source(output)).arguments[:2]
    assert first is not second


def test_repetitions_have_one_source() -> None:
    output, _, canon = _parts(lambda a, b: (a * b) - (a * b), 2, torch.float32)
    first, second = canon.form(canon.source(output)).arguments[:2]
    assert first is second


def test_text_lists_operands_first() -> None:
    output, leaves, canon = _parts(lambda a, b: (a * b).exp(), 2, torch.float32)
    assert text(output, leaves, canon).splitlines() == [
        "%0 = aten.mul.Tensor(in0, in1)",
        "%1 = aten.exp.default(%0)",
    ]


def test_symbols_become_distinct_primes() -> None:
    sizes, seen = Sizes(), []

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((a, b))

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        for node in gm.graph.nodes:
            fake = node.meta.get("example_value")
            if isinstance(fake, Tensor):
                seen.append(sizes.shape(fake))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=True)(torch.rand(4, 3), torch.rand(5, 3))
    (rows, columns), (others, same), joined = seen
    assert columns == same and len({rows, columns, others}) == 3
    assert min(rows, columns, others) > 1000
    assert joined == (rows + others, columns)


def test_a_node_without_a_fake_value_is_none() -> None:
    assert value(fx.Graph().placeholder("x")) is None


def test_symbols_of_short_ranges_stay_distinct() -> None:
    sizes, seen = Sizes(), []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        fakes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        seen.extend(sizes.shape(fake)[0] for fake in fakes if isinstance(fake, Tensor))
        return gm.forward

    a, b, c = torch.rand(4, 3), torch.rand(5, 3), torch.rand(6, 3)
    for tensor, highest in ((a, 16), (b, 16), (c, 15)):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=highest)
    torch._dynamo.reset()
    torch.compile(lambda *given: [g + 1 for g in given], backend=backend)(a, b, c)
    assert seen == [16, 15, 14]


def test_the_shape_of_a_node_without_a_fake_value_is_unknown() -> None:
    with pytest.raises(UnknownSizeError, match="a node has no recorded value"):
        Sizes().shape(value(fx.Graph().placeholder("x")))


def test_reshapes_with_keyword_arguments_have_the_same_form() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(SHAPE)
    spellings = [
        graph.call_function(torch.ops.aten.view.default, (x, [48])),
        graph.call_function(torch.ops.aten.view.default, (), {"self": x, "size": [48]}),
    ]
    for node in spellings:
        node.meta["val"] = torch.empty(48)
    canon = Canon(graph)
    assert canon.source(spellings[0]) is canon.source(spellings[1])
