"""Hold compiled CPU graphs to the eager operator, bit for bit, and see which call they make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import EXPERTS, Problem, problem, with_scheme
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from int8moe_compile.lowerings import cpu, cpu_build
from int8moe_compile.ops.arguments import ExpertsArguments

DIRECT, OPERATOR = " int8moe_experts_", "torch.ops.int8moe.experts.default("


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Layer(nn.Module):
    """Hold the weights of a problem as a model does, so that only T can be symbolic."""

    def __init__(self, case: Problem) -> None:
        super().__init__()
        named = dict(zip(ExpertsArguments._fields, case.args, strict=False)) | case.options
        for name in ("hidden_states", "topk_weights", "topk_ids"):
            named.pop(name)
        self.words = {k: v for k, v in named.items() if not isinstance(v, Tensor)}
        self.tensors = [k for k in named if k not in self.words]
        for name in self.tensors:
            if name in ("w13", "w2"):  # sizes of parameters are static
                named[name] = nn.Parameter(named[name], requires_grad=False)
                self.register_parameter(name, named[name])
            else:
                self.register_buffer(name, named[name])

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        given: dict[str, Any] = {name: getattr(self, name) for name in self.tensors}
        out: Tensor = EXPERTS(
            hidden_states=x, topk_weights=weights, topk_ids=ids, **given, **self.words
        )
        return out


def inputs(case: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return case.hidden_states, case.topk_weights, case.topk_ids


CASES: dict[str, dict[str, Any]] = {
    "biases, limit": dict(w13_bias=True, w2_bias=True, limit=7.0, beta=1.0, alpha=1.702),
    "expert_map": dict(expert_map=torch.tensor([3, -1, 0, 9, 2, 1])),
    "not gated": dict(gated=False, activation="relu2"),
    "out_dtype": dict(out_dtype=torch.float32),
}


def case_of(name: str, word: str) -> Problem:
    options = dict(CASES[name])
    gated = options.pop("gated", True)
    case = problem(5, T=11, H=48, I=32, E=4, K=2, gated=gated)
    for bias, like in (("w13_bias", case.w13), ("w2_bias", case.w2)):
        if options.get(bias):
            options[bias] = torch.randn(like.shape[:2])
    return with_scheme(case.with_(**options), word)


@pytest.mark.parametrize("word", ["token", "tensor", "static", "none"])
def test_graphs_give_the_bits_of_the_operator(word: str) -> None:
    for name in CASES:
        case = case_of(name, word)
        layer = Layer(case)
        out, code = run_and_get_code(torch.compile(layer, fullgraph=True), *inputs(case))
        assert torch.equal(out, case.run()), name
        assert (code[0].count(DIRECT), code[0].count(OPERATOR)) == (1, 0), name


def test_one_graph_serves_every_number_of_tokens() -> None:
    case = problem(6, T=70, H=48, I=32, E=4, K=2)
    compiled = torch.compile(Layer(case), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        _, code = run_and_get_code(compiled, *inputs(case))
        for count in (7, 70, 2, 33):
            part = case.rows(slice(count))
            assert torch.equal(compiled(*inputs(part)), part.run()), count
    assert (code[0].count(DIRECT), code[0].count(OPERATOR)) == (1, 0)


def test_layers_of_one_layout_share_one_definition() -> None:
    cases = [problem(seed, T=5, H=32, I=32, E=4, K=2) for seed in (1, 2)]
    layers = [Layer(case) for case in cases]

    def both(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return layers[1](layers[0](x, weights, ids), weights, ids)

    out, code = run_and_get_code(torch.compile(both, fullgraph=True), *inputs(cases[0]))
    assert torch.equal(out, both(*inputs(cases[0])))
    assert code[0].count("= Int8MoeGraphCall(") == 1
    assert code[0].count(DIRECT) == 2


@pytest.mark.parametrize("strided", ["hidden_states", "topk_weights", "topk_ids", "w2_bias"])
def test_strided_tensors(strided: str) -> None:
    case = case_of("biases, limit", "token")
    named = dict(zip(ExpertsArguments._fields, case.args, strict=False)) | case.options
    spread = torch.stack([named[strided], named[strided]], dim=-1)[..., 0]
    assert not spread.is_contiguous()
    case = case.with_(**{strided: spread})
    assert torch.equal(torch.compile(Layer(case), fullgraph=True)(*inputs(case)), case.run())


def test_scales_that_the_graph_computes() -> None:
    """Inductor leaves a single value without dimensions unrealized when it has to be contiguous."""
    case = with_scheme(problem(4, T=5, H=32, I=32, E=4, K=2), "static")

    def scaled(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        scales = {"a13_scale": x.float().abs().max() / 127, "a2_scale": torch.tensor(0.05)}
        named = dict(hidden_states=x, topk_weights=weights, topk_ids=ids)
        return case.with_(**named, **scales).run()

    compiled = torch.compile(scaled, fullgraph=True)
    assert torch.equal(compiled(*inputs(case)), scaled(*inputs(case)))


def test_unknown_layouts_call_the_operator() -> None:
    first, second = (problem(3, T=5, H=32, I=32, E=experts, K=2) for experts in (4, 6))
    compiled = torch.compile(lambda *args: EXPERTS(*args), fullgraph=True, dynamic=True)
    out, code = run_and_get_code(compiled, *first.args)
    assert torch.equal(out, first.run())
    assert torch.equal(compiled(*second.args), second.run())
    assert (code[0].count(DIRECT), code[0].count(OPERATOR)) == (0, 1)


def test_graphs_without_python_call_the_operator() -> None:
    case = problem(8, T=5, H=32, I=32, E=4, K=2)
    compiled = torch.compile(Layer(case), fullgraph=True, options={"cpp_wrapper": True})
    assert torch.equal(compiled(*inputs(case)), case.run())


def test_branches_of_a_graph() -> None:
    case = problem(9, T=5, H=32, I=32, E=4, K=2)
    layer = Layer(case)

    def either(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = torch.cond(
            x.sum() > 0, lambda *args: layer(*args), lambda x, *_: x.clone(), (x, weights, ids)
        )
        return result

    x, weights, ids = inputs(case)
    compiled = torch.compile(either, fullgraph=True)
    _, code = run_and_get_code(compiled, x, weights, ids)
    assert (code[0].count(DIRECT), code[0].count(OPERATOR)) == (1, 0)
    for sign in (1, -1):
        x = x.abs() * sign
        assert torch.equal(compiled(x, weights, ids), either(x, weights, ids))


def test_without_a_compiler_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph from a cache may run where no kernel can be built."""
    case = case_of("biases, limit", "token")
    compiled = torch.compile(Layer(case), fullgraph=True)
    with_kernel = compiled(*inputs(case))
    monkeypatch.setattr(cpu_build, "kernel", lambda: None)
    without = compiled(*inputs(case))
    assert torch.equal(without, case.run())
    assert torch.allclose(without.float(), with_kernel.float(), rtol=0.02, atol=0.02)


def test_no_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(8, T=5, H=32, I=32, E=4, K=2)
    compiled = torch.compile(Layer(case), fullgraph=True)
    compiled(*inputs(case))
    monkeypatch.setattr(cpu_build, "kernel", lambda: lambda packed: 1)
    with pytest.raises(MemoryError, match="no memory for 5 tokens"):
        compiled(*inputs(case))


def test_no_tokens() -> None:
    case = problem(8, T=5, H=32, I=32, E=4, K=2)
    compiled = torch.compile(Layer(case), fullgraph=True, dynamic=True)
    compiled(*inputs(case))
    assert compiled(*inputs(case.rows(slice(0)))).shape == (0, 32)


def test_layouts_are_those_of_the_call() -> None:
    """Stand-ins without memory give the layouts of the tensors that they stand for."""
    for name, word in itertools.product(CASES, ("token", "static")):
        case = case_of(name, word)
        call = ExpertsArguments(*case.args, **case.options)
        meta = call._replace(
            **{k: v.to("meta") for k, v in call._asdict().items() if isinstance(v, Tensor)}
        )
        assert cpu.Layouts.of(meta) == cpu.Layouts.of(call)
