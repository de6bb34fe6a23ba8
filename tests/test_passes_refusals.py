"""Graphs that are almost an experts call: left alone with a reason, or rewritten and right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, Captured, run
from torch import Tensor, nn
from transformers.integrations import moe

from int8moe_compile import oracle
from int8moe_compile.hf import experts_arguments
from int8moe_compile.passes import notices
from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.quantization import quantize_


@pytest.fixture(autouse=True)
def every_warning() -> Iterator[None]:
    notices.forget()
    yield
    notices.forget()


class Nothing(ExpertsPass):
    """Leave every graph as it is."""

    def __call__(self, graph: Any) -> None:
        return


def build(name: str = "MixtralExperts", **options: Any) -> nn.Module:
    return quantize_(hf_models.build_experts(hf_models.experts_class(name), **options))


def eager(experts: nn.Module, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return torch.ops.int8moe.experts(
        hidden_states, topk_weights=weights, topk_ids=ids, **experts_arguments(experts)
    )


def with_forward(experts: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Register forward as the experts implementation of one module."""
    moe.ALL_EXPERTS_FUNCTIONS.register(forward.__name__, forward)
    experts.config._experts_implementation = forward.__name__
    return experts


def assert_left_alone(experts: nn.Module, reason: str) -> Captured:
    """Expect an unchanged graph, both markers in it, the same bits, and the reason."""
    inputs = hf_models.routed()
    got = run(experts, *inputs)
    without = run(experts, *inputs, experts_pass=Nothing())
    assert not got.calls(EXPERTS) and len(got.calls(MARKER)) == 2
    assert [outcome.rewritten for outcome in got.outcomes] == [False]
    assert reason in str(got.reasons[0])
    assert str(got.graphs[0].graph) == str(without.graphs[0].graph)
    for mine, theirs in zip(_tensors(got.result), _tensors(without.result), strict=True):
        assert torch.equal(mine, theirs)
    return got


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class Stub:
    """Stand in for an experts module under Dynamo."""

    num_experts = hf_models.EXPERTS
    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, gate_up_proj: Tensor, down_proj: Tensor, gate: Any) -> None:
        self.gate_up_proj, self.down_proj, self._apply_gate = gate_up_proj, down_proj, gate


def grouped(
    module: Any,
    hidden_states: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    gate: Callable[[Tensor], Tensor],
    between: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> tuple[Tensor, Tensor]:
    """State the grouped forward again with other things in it; returns it and the first product."""
    first = []

    def around_gate(projected: Tensor) -> Tensor:
        first.append(projected)
        return gate(between(projected))

    stub: Any = Stub(module.gate_up_proj, module.down_proj, around_gate)
    result = moe.grouped_mm_experts_forward(stub, hidden_states, ids, weights)
    return result, first[0]


def silu_gate(projected: Tensor) -> Tensor:
    gate, up = projected.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def test_a_result_on_the_way_is_returned_too() -> None:
    def returns_first_product(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        return grouped(self, x, ids, weights, gate=silu_gate)

    assert_left_alone(with_forward(build(), returns_first_product), "is also used by output")


def test_an_addition_in_place_between() -> None:
    def adds_in_place(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return grouped(self, x, ids, weights, gate=silu_gate, between=lambda r: r.add_(0.5))[0]

    assert_left_alone(with_forward(build(), adds_in_place), "grouped_mm forward")


def test_a_write_into_an_input_while_it_is_computed() -> None:
    experts = build()
    graphs: list[Any] = []

    class Writes(ExpertsPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            first = next(node for node in graph.nodes if node.target is MARKER)
            written = next(node for node in graph.nodes if "hidden" in str(node.target) or True)
            with graph.inserting_after(first):
                zeroed = graph.call_function(torch.ops.aten.zero_.default, (written,))
            zeroed.meta["val"] = written.meta["val"]
            graphs.append(graph)
            super().__call__(graph)

    got = run(experts, *hf_models.routed(), experts_pass=Writes())
    assert not got.calls(EXPERTS)
    assert "writes into" in str(got.reasons[0])


@pytest.mark.parametrize(
    "gate",
    [
        lambda r: silu_gate(r.to(r.dtype)),  # a cast to the same dtype
        lambda r: nn.functional.silu(r[..., : r.shape[-1] // 2]) * r[..., r.shape[-1] // 2 :],
        lambda r: r.chunk(2, -1)[1] * nn.functional.silu(r.chunk(2, -1)[0]),
    ],
    ids=["cast", "slices", "swapped operands"],
)
def test_other_spellings_are_rewritten_and_right(gate: Callable[[Tensor], Tensor]) -> None:
    def other_spelling(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return grouped(self, x, ids, weights, gate=gate)[0]

    experts, inputs = build(), hf_models.routed()
    wanted = eager(experts, *inputs)
    got = run(with_forward(experts, other_spelling), *inputs)
    assert len(got.calls(EXPERTS)) == 1
    assert torch.equal(got.result, wanted)


@pytest.mark.parametrize(
    "gate",
    [
        lambda g, u: nn.functional.silu(u) * g,  # up first, then gate
        lambda g, u: nn.functional.silu(g) * u.clamp(max=5.0),
        lambda g, u: nn.functional.silu(g).clamp(max=7.0) * u.clamp(min=-7.0, max=7.0),
        lambda g, u: nn.functional.silu(g.clamp(max=7.0)) * u.clamp(min=-6.0, max=7.0),
        lambda g, u: nn.functional.silu(g.clamp(min=-7.0, max=7.0)) * u.clamp(min=-7.0, max=7.0),
        lambda g, u: nn.functional.mish(g) * u,
        lambda g, u: nn.functional.softplus(g) * u,
        lambda g, u: nn.functional.silu(g) + u,
        lambda g, u: nn.functional.silu(g) * g,
        lambda g, u: nn.functional.silu(g) * u * 2.0,
        lambda g, u: nn.functional.leaky_relu(g) * u,
        lambda g, u: nn.functional.silu(g) * (u - 1.0),
    ],
)
def test_other_gates_are_left_alone(gate: Callable[[Tensor, Tensor], Tensor]) -> None:
    def other_gate(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return grouped(self, x, ids, weights, gate=lambda r: gate(*r.chunk(2, dim=-1)))[0]

    experts, inputs = build(), hf_models.routed()
    got = run(with_forward(experts, other_gate), *inputs)
    assert not got.calls(EXPERTS)
    assert "activation between the two products" in str(got.reasons[0])


@pytest.mark.parametrize("change", ["twice", "weights of one", "transposed sum", "another bias"])
def test_other_surroundings_are_left_alone(change: str) -> None:
    def other(self: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if change == "twice":
            weights = weights * 1.0
            return grouped(self, x * 2.0, ids, weights, gate=silu_gate)[0] * 2.0
        if change == "weights of one":
            result, _ = grouped(self, x, ids, torch.ones_like(weights), gate=silu_gate)
            return result
        if change == "transposed sum":
            return grouped(self, x, ids.flip(-1), weights.flip(-1), gate=silu_gate)[0]
        return grouped(self, x, ids, weights, gate=silu_gate)[0] + 1.0

    experts, inputs = build(), hf_models.routed()
    got = run(with_forward(experts, other), *inputs)
    # These are experts calls with something before or behind: rewritten, and the rest stays.
    assert len(got.calls(EXPERTS)) == 1
    without = run(experts, *inputs, experts_pass=Nothing()).result.float()
    assert (got.result.float() - without).norm() < 0.03 * without.norm()


def test_two_calls_of_one_module_are_two_operators() -> None:
    experts, inputs = build(), hf_models.routed()

    def both(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts(experts(x, ids, weights), ids, weights)

    got = run(both, *inputs)
    wanted = eager(experts, eager(experts, *inputs), *inputs[1:])
    assert len(got.calls(EXPERTS)) == 2 and not got.calls(MARKER)
    assert torch.equal(got.result, wanted)


def test_a_graph_with_gradients_is_left_alone_with_one_warning() -> None:
    hidden_states, ids, weights = hf_models.routed(dtype=torch.float32)
    experts = build(dtype=torch.float32, implementation="batched_mm")
    gradients = []
    for experts_pass, warned in ((ExpertsPass(), 1), (Nothing(), 0)):
        x = hidden_states.clone().requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                got = run(experts, x, ids, weights, grad=True, experts_pass=experts_pass)
        assert not got.calls(EXPERTS) and got.calls(MARKER)
        ours = [w for w in caught if "int8moe_compile leaves a graph alone" in str(w.message)]
        assert len(ours) == warned
        got.result.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_grad_mode_without_gradients_is_rewritten() -> None:
    experts, inputs = build(), hf_models.routed()
    assert len(run(experts, *inputs, grad=True).calls(EXPERTS)) == 1


def test_loops_are_left_alone_with_a_way_out() -> None:
    experts, inputs = build(implementation="eager"), hf_models.routed()
    with torch.no_grad():
        wanted = experts(*inputs)
    got = run(experts, *inputs, fullgraph=False)
    assert not got.calls(EXPERTS)
    assert torch.equal(got.result, wanted)
    assert len(got.outcomes) == 1  # however many graphs the loop broke into
    assert "set_experts_implementation('grouped_mm')" in str(got.reasons[0])
    experts.config._experts_implementation = "grouped_mm"
    assert len(run(experts, *inputs).calls(EXPERTS)) == 1


def test_a_refusing_oracle_leaves_the_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = build()
    monkeypatch.setattr(oracle, "BACKENDS", oracle.BACKENDS[:2])
    got = assert_left_alone(experts, "no INT8 MoE backend accepts")
    assert "granularity='channel'" in str(got.reasons[0])
    assert "granularity='token'" in str(got.reasons[0])


def test_a_named_backend_that_refuses_is_a_value_error() -> None:
    experts, inputs = build(), hf_models.routed()
    with pytest.raises(ValueError, match="'triton' cannot run this problem: needs a CUDA") as error:
        run(experts, *inputs, experts_pass=ExpertsPass("triton"))
    assert "'humming'" in str(error.value)
    quiet = run(experts, *inputs, experts_pass=ExpertsPass("triton", raises=False))
    assert "needs a CUDA" in str(quiet.reasons[0])


def test_markers_that_want_different_activations_are_left_alone() -> None:
    experts, inputs = build(), hf_models.routed()

    class Changes(ExpertsPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            marker = next(node for node in graph.nodes if node.target is MARKER)
            marker.update_kwarg("activation_quant", "none")
            super().__call__(graph)

    got = run(experts, *inputs, experts_pass=Changes())
    assert "different activation_quant" in str(got.reasons[0])


def test_the_sorted_ids_may_be_used_elsewhere() -> None:
    """What does not depend on the weights is cheap and stays."""
    experts, inputs = build(), hf_models.routed()

    def with_more(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return experts(x, ids, weights), ids + 1

    class Shares(ExpertsPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            counts = next(n for n in graph.nodes if n.target is torch.ops.aten.cumsum.default)
            output = next(iter(reversed(graph.nodes)))
            output.args = ((output.args[0][0], counts),)
            super().__call__(graph)

    got = run(with_more, *inputs, experts_pass=Shares())
    assert len(got.calls(EXPERTS)) == 1 and not got.calls(MARKER)
    assert torch.equal(got.result[0], eager(experts, *inputs))
    assert got.result[1][-1] == inputs[1].numel()


@pytest.mark.parametrize("where", ["ids", "weights", "marker", "slots", "output"])
def test_a_pass_before_that_records_no_values_does_no_harm(where: str) -> None:
    """A view without meta["val"] at any place: left alone with a reason, or rewritten and right."""
    experts, inputs = build(), hf_models.routed()
    with_view: list[tuple[torch.fx.Node, Tensor]] = []

    def adds_a_view(graph: torch.fx.Graph) -> None:
        nodes = list(graph.nodes)
        total = next(node for node in nodes if node.target is torch.ops.aten.sum.dim_IntList)
        slots = total.args[0]
        total.args, total.kwargs = (), {"self": slots, "dim": [1]}
        routing = [
            n for n in nodes if n.op == "placeholder" and n.meta["val"].shape == inputs[1].shape
        ]
        node = {
            "ids": next(n for n in routing if not n.meta["val"].is_floating_point()),
            "weights": next(n for n in routing if n.meta["val"].is_floating_point()),
            "marker": [n for n in nodes if n.target is MARKER][-1],
            "slots": slots,
            "output": total,
        }[where]
        with graph.inserting_after(node):
            size = list(node.meta["val"].shape)
            view = graph.call_function(torch.ops.aten.view.default, (node, size))
        node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)
        with_view.append((view, node.meta["val"]))

    class Behind(ExpertsPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            adds_a_view(graph)
            super().__call__(graph)
            for view, fake in with_view:  # Inductor itself needs the value of some
                view.meta["val"] = fake

    got = run(experts, *inputs, experts_pass=Behind())
    assert with_view and len(got.outcomes) == 1
    if got.calls(EXPERTS):
        assert torch.equal(got.result, eager(experts, *inputs))
    else:
        assert got.reasons[0]
        assert torch.equal(got.result, run(experts, *inputs, experts_pass=Nothing()).result)


def test_a_value_error_inside_the_check_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the refusal of a named backend stops a compilation."""

    def fails(*_: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr("int8moe_compile.passes.checks.full_pattern", fails)
    got = assert_left_alone(build(), "failed: ValueError: no such thing")
    assert len(got.outcomes) == 1


def test_layers_left_alone_warn_once_a_reason() -> None:
    def warned(experts_pass: ExpertsPass) -> list[str]:
        experts, inputs = build(implementation="eager"), hf_models.routed()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                run(experts, *inputs, fullgraph=False, experts_pass=experts_pass)
        return [str(w.message) for w in caught if "run dequantised" in str(w.message)]

    assert warned(ExpertsPass(raises=False)) == []
    (message,) = warned(ExpertsPass())
    assert ": INT8 experts run dequantised: the experts run as a Python loop" in message
