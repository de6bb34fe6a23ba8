"""Run the operators through opcheck, torch.compile, export and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import DEQUANTIZE, EXPERTS, Problem, assert_close, problem, with_scheme
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

WORDS = ("token", "tensor", "static", "none")


class Layer(torch.nn.Module):
    """Hold a problem's weights and options; take its rows."""

    def __init__(self, case: Problem) -> None:
        super().__init__()
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            self.register_buffer(name, getattr(case, name))
        for name, value in case.options.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
        self.names = [name for name, value in case.options.items() if isinstance(value, Tensor)]
        self.plain = {k: v for k, v in case.options.items() if k not in self.names}

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        tensors = {name: getattr(self, name) for name in self.names}
        out: Tensor = EXPERTS(
            x, self.w13, self.w13_scale, self.w2, self.w2_scale, weights, ids, **tensors,
            **self.plain,
        )  # fmt: skip
        return out


def rows_of(case: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return case.hidden_states, case.topk_weights, case.topk_ids


class Graphs:
    """Count what a backend compiled."""

    def __init__(self, inner: str = "aot_eager") -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.inner = torch._dynamo.lookup_backend(inner)

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(gm)
        compiled: Callable[..., Any] = self.inner(gm, inputs)
        return compiled


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


OPCHECKS = {
    **{word: lambda word=word: with_scheme(problem(1), word) for word in WORDS},
    "tensor weights": lambda: with_scheme(problem(2), "static", "tensor"),
    "halves": lambda: with_scheme(problem(2, dtype=torch.float16), "token", "halves"),
    "no tokens": lambda: problem(3, T=0),
    "one token": lambda: problem(3, T=1),
    "int8 rows": lambda: problem(4).with_(
        hidden_states=torch.ones(5, 64, dtype=torch.int8), a13_scale=torch.ones(5)
    ),
    "transposed rows": lambda: problem(4).with_(hidden_states=torch.ones(64, 5).t()),
    "everything": lambda: problem(5, T=6, dtype=torch.float32).with_(
        w13_bias=torch.ones(4, 64),
        w2_bias=torch.ones(4, 64),
        expert_map=torch.tensor([0, -1, 3, 2]),
        alpha=1.702,
        beta=1.0,
        limit=7.0,
        out_dtype=torch.float16,
    ),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck_experts(name: str) -> None:
    case = OPCHECKS[name]()
    torch.library.opcheck(EXPERTS.default, case.args, case.options)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("columns", [1, 2, 6])
def test_opcheck_dequantize(word: str, columns: int) -> None:
    codes = torch.randint(-127, 128, (3, 6, 5), dtype=torch.int8)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "activation_quant": word}
    if word == "static":
        options["a_scale"] = torch.ones(1)
    for scale in (torch.rand(3, columns), torch.rand(3, columns, 1)):
        torch.library.opcheck(DEQUANTIZE.default, (codes, scale), options)
    turned = codes.transpose(0, 2)
    torch.library.opcheck(DEQUANTIZE.default, (turned, torch.rand(5, 6)), options)


def test_opcheck_no_backward() -> None:
    # its kernel only raises, so what remains to check is the registration and the fake
    op = torch.ops.int8moe.no_backward.default
    torch.library.opcheck(op, (torch.ones(2),), test_utils="test_autograd_registration")
    meta = torch.ones(3, 4, device="meta")
    assert op(meta).shape == (3, 4)
    with pytest.raises(NotImplementedError, match="inference_mode"):
        op(torch.ones(2))


def test_schemas_mutate_nothing() -> None:
    for op in (EXPERTS, DEQUANTIZE, torch.ops.int8moe.no_backward):
        schema = op.default._schema
        assert not schema.is_mutable and "!" not in str(schema)
        assert all(value.alias_info is None for value in [*schema.arguments, *schema.returns])


@pytest.mark.parametrize("word", WORDS)
def test_one_graph_for_every_number_of_tokens(word: str) -> None:
    case = with_scheme(problem(6, T=9), word)
    graphs = Graphs()
    compiled = torch.compile(Layer(case), fullgraph=True, dynamic=True, backend=graphs)
    with torch.inference_mode():
        for tokens in (6, 9, 3, 2):
            part = case.rows(slice(0, tokens))
            assert torch.equal(compiled(*rows_of(part)), part.run())
    assert len(graphs.graphs) == 1
    calls = [n for n in graphs.graphs[0].graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in calls] == ["int8moe.experts"]


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("word", WORDS)
def test_compiled_in_grad_mode_without_gradients(word: str, tokens: int) -> None:
    case = with_scheme(problem(7, T=tokens), word)
    compiled = torch.compile(Layer(case), fullgraph=True, dynamic=True, backend="aot_eager")
    out = compiled(*rows_of(case))
    assert torch.equal(out, case.run()) and not out.requires_grad
    assert out.shape == (tokens, 64) and out.stride() == (64, 1) and out.dtype == torch.bfloat16


def test_float_options_may_be_symbolic() -> None:
    case = problem(8, dtype=torch.float32)

    def run(x: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
        out: Tensor = EXPERTS(x, *case.args[1:], alpha=alpha, beta=beta, limit=limit)
        return out

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for values in ((1.702, 1.0, 7.0), (1.5, 0.5, 0.1), (1.25, 0.25, 0.2)):
        assert torch.equal(compiled(case.hidden_states, *values), run(case.hidden_states, *values))


@pytest.mark.parametrize(
    "backend, learns",
    [
        (None, "hidden_states"),
        (None, "topk_weights"),
        (None, "w13_bias"),
        (None, "both"),
        ("static", "both"),
        ("dynamic", "hidden_states"),
    ],
)
def test_forward_works_in_grad_mode_and_backward_says_why_not(
    backend: str | None, learns: str
) -> None:
    case = problem(9, dtype=torch.float32, w13_bias=torch.zeros(4, 64))
    wanted = case.run()
    names = ("hidden_states", "topk_weights") if learns == "both" else (learns,)
    values = {**vars(case), **case.options}
    leaves = {name: values[name].clone().requires_grad_() for name in names}
    case = case.with_(**leaves)

    def run(x: Tensor) -> Tensor:
        out: Tensor = EXPERTS(x * 1.0, *case.args[1:], **case.options) * 1.0
        return out

    if backend is not None:
        dynamic = backend == "dynamic"
        run = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    out = run(case.hidden_states)
    assert out.requires_grad and torch.equal(out.detach(), wanted)
    with pytest.raises(NotImplementedError, match=r"inference_mode\(\) or torch\.no_grad\(\)"):
        out.sum().backward()
    assert all(leaf.grad is None for leaf in leaves.values())
    with torch.no_grad():
        assert not run(case.hidden_states).requires_grad
    with torch.inference_mode():
        assert torch.equal(run(case.hidden_states), wanted)


@pytest.mark.parametrize("learns", ["hidden_states", "topk_weights", "w13_bias"])
def test_forward_mode_says_why_not(learns: str) -> None:
    # Taken for a constant, the operator would pass on a tangent of zero without a word.
    case = problem(9, dtype=torch.float32, w13_bias=torch.zeros(4, 64))
    values = {**vars(case), **case.options}
    primal = values[learns]

    def run(x: Tensor) -> Tensor:
        return case.with_(**{learns: x}).run()

    with pytest.raises(NotImplementedError, match=r"torch\.func\.jvp.*Detach its inputs"):
        torch.func.jvp(run, (primal,), (torch.ones_like(primal),))
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward mode"),
    ):
        run(forward_ad.make_dual(primal, torch.ones_like(primal)))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jacfwd(run)(primal)

    def beside(x: Tensor) -> Tensor:
        return x * 3 + case.run().sum()

    _, tangent = torch.func.jvp(beside, (primal,), (torch.ones_like(primal),))
    assert torch.equal(tangent, torch.full_like(primal, 3))


def _per_sample(run: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.vmap(torch.func.grad(lambda row: run(row).sum()))(x[None])


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda run, x: torch.func.grad(lambda row: run(row).sum())(x),
    "vjp": lambda run, x: torch.func.vjp(run, x)[1](torch.ones_like(run(x))),
    "jacrev": lambda run, x: torch.func.jacrev(run)(x),
    "grad of grad": lambda run, x: torch.func.grad(
        lambda row: torch.func.grad(lambda one: run(one).sum())(row).sum()
    )(x),
    "vmap of grad": _per_sample,
}


# A compiler drops the opaque operator of a second derivative, in which nothing depends on it.
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in TRANSFORMS), ("grad", True), ("vjp", True), ("jacrev", True)],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_reverse_mode_transforms_say_why_not(name: str, compiled: bool) -> None:
    case = problem(9, dtype=torch.float32)

    def run(x: Tensor) -> Tensor:
        out: Tensor = EXPERTS(x, *case.args[1:], **case.options)
        return out * 1.0

    def call(x: Tensor) -> Any:
        return TRANSFORMS[name](run, x)

    function = torch.compile(call, backend="aot_eager") if compiled else call
    with pytest.raises(NotImplementedError, match=r"inference_mode\(\) or torch\.no_grad\(\)"):
        function(case.hidden_states)


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_of_a_reverse_mode_transform_works(compiled: bool) -> None:
    case = problem(9, dtype=torch.float32)

    def run(x: Tensor) -> Tensor:
        out: Tensor = EXPERTS(x, *case.args[1:], **case.options)
        return out

    def forward(x: Tensor) -> Tensor:
        return torch.func.vjp(run, x)[0]

    def beside(x: Tensor) -> Tensor:
        return (run(x.detach()) * 0 + x * 3).sum()

    wrap = torch.compile(backend="aot_eager") if compiled else lambda function: function
    assert torch.equal(wrap(forward)(case.hidden_states), case.run())
    gradient = wrap(torch.func.grad(beside))(case.hidden_states)
    assert torch.equal(gradient, torch.full_like(case.hidden_states, 3))


def test_gradients_pass_by_on_another_path() -> None:
    case = problem(9, dtype=torch.float32)
    x = case.hidden_states.clone().requires_grad_()
    out = x * 3 + EXPERTS(x.detach(), *case.args[1:])
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_errors_at_trace_time_are_the_kernels() -> None:
    case = problem(10).with_(w13_scale=torch.ones(4, 5))
    with pytest.raises(ValueError) as eager:
        case.run()
    compiled = torch.compile(Layer(case), fullgraph=True, dynamic=True, backend="eager")
    with pytest.raises(Exception) as traced:
        compiled(*rows_of(case))
    assert "w13_scale" in str(eager.value) and str(eager.value) in str(traced.value)


def chosen_rows(layer: Layer, x: Tensor, weights: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
    """Run on rows whose number only the data knows."""
    index = keep.nonzero().squeeze(1)
    out: Tensor = layer(x[index], weights[index], ids[index])
    return out


@pytest.mark.parametrize("word", WORDS)
def test_make_fx_with_an_unbacked_number_of_tokens(word: str) -> None:
    case = with_scheme(problem(11, T=6), word)
    layer = Layer(case)
    keep = torch.tensor([True, False, True, True, False, True])

    def run(x: Tensor, weights: Tensor, ids: Tensor, keep: Tensor) -> Tensor:
        return chosen_rows(layer, x, weights, ids, keep)

    graph = make_fx(
        run,
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
        _error_on_data_dependent_ops=False,
    )(*rows_of(case), keep)
    assert "int8moe.experts" in graph.code
    for mask in (keep, ~keep, torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)):
        assert torch.equal(graph(*rows_of(case), mask), case.rows(mask).run())


def test_compile_with_an_unbacked_number_of_tokens() -> None:
    case = problem(11, T=6)
    layer = Layer(case)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen_rows, fullgraph=True, backend="aot_eager")
        for mask in (torch.arange(6) % 2 == 0, torch.zeros(6, dtype=torch.bool)):
            assert torch.equal(compiled(layer, *rows_of(case), mask), case.rows(mask).run())


def test_export_with_a_dynamic_number_of_tokens() -> None:
    case = with_scheme(problem(12, T=4096), "static")
    part = case.rows(slice(0, 5))
    tokens = {0: torch.export.Dim("T")}
    program = torch.export.export(
        Layer(case), rows_of(part), dynamic_shapes={"x": tokens, "weights": tokens, "ids": tokens}
    )
    for module in (program.module(), program.run_decompositions().module()):
        assert "int8moe.experts" in module.code
        for count in (1, 7, 4096):
            one = case.rows(slice(0, count))
            assert torch.equal(module(*rows_of(one)), one.run())


def test_padding_of_no_size_shows_in_the_result() -> None:
    case = problem(13, T=3, H=2880, I=32, K=4)
    compiled = torch.compile(Layer(case), fullgraph=True, backend="aot_eager")
    meta = EXPERTS(*(tensor.to("meta") for tensor in case.args))
    for out in (case.run(), compiled(*rows_of(case)), meta):
        assert out.shape == (3, 2880) and out.stride() == (2880, 1)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("word", WORDS)
def test_inductor(word: str, grad: bool) -> None:
    case = with_scheme(problem(14, T=9), word)
    compiled = torch.compile(Layer(case), fullgraph=True, dynamic=True)
    with torch.set_grad_enabled(grad):
        for tokens in (9, 4):
            part = case.rows(slice(0, tokens))
            assert_close(compiled(*rows_of(part)), part)
    if grad:
        x = case.hidden_states.clone().requires_grad_()
        out = compiled(x, case.topk_weights, case.topk_ids)
        with pytest.raises(NotImplementedError, match="no_grad"):
            out.sum().backward()
