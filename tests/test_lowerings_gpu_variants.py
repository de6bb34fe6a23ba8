"""Variants on a GPU: the same bits as the tables' kernels, eager, compiled and in CUDA graphs."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import EXPERTS, Problem, assert_close, problem, with_scheme

from int8moe_compile.lowerings import (
    eager,
    eager_variants,
    variant_candidates,
    variant_tables,
    variants,
)
from int8moe_compile.lowerings.variants import Schedule, Variant
from int8moe_compile.ops.arguments import ExpertsArguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def found(case: Problem) -> tuple[Variant, ...]:
    """Return the variants that take a case on this GPU, without the default."""
    call = ExpertsArguments(*case.args, **case.options)
    up, down = eager.layer_products(call)
    device = eager.facts_of(case.hidden_states.device)
    return variant_candidates.candidates(up, down, device, eager_variants.features_of(call))[1:]


def has_async() -> bool:
    """Say whether asynchronous products are to be there."""
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    return is_hopper and importlib.metadata.version("triton").startswith(("3.6.", "3.7."))


def sized(T: int, word: str = "token", **options: Any) -> Problem:
    """Return a case whose rows descriptors take, on the GPU."""
    return with_scheme(problem(1, T=T, H=512, I=384, E=8, K=2, **options), word).to("cuda")


@pytest.mark.parametrize("T", [1, 2, 7, 17, 64, 260, 300, 1100])
@pytest.mark.parametrize("word", ["token", "static", "none"])
def test_variants_give_the_same_bits(T: int, word: str) -> None:
    biases = {"w13_bias": torch.randn(8, 768), "w2_bias": torch.randn(8, 512)}
    case = sized(T, word, alpha=1.7, beta=1.0, limit=2.0, **biases)
    expected = run_apart(case)
    if word == "none" and not found(case):
        pytest.skip("weight-only experts have no variant for so many contributions")
    assert found(case)
    for variant in found(case):
        with variants.forced(variant):
            out = case.run()
        if word == "none":
            assert_close(out, case.to("cpu"))
        else:
            assert torch.equal(out, expected), variants.label(variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
def test_variants_of_uneven_depths_give_the_same_bits(gated: bool, dtype: torch.dtype) -> None:
    """What a depth leaves over of a block is read as zeros, rows past an expert's end as others."""
    case = problem(3, T=1100, H=528, I=400, E=8, K=2, dtype=dtype, gated=gated).to("cuda")
    expected = run_apart(case)
    loads = set()
    for variant in found(case):
        with variants.forced(variant):
            assert torch.equal(case.run(), expected), variants.label(variant)
        loads.add(variant.up.loads)
    assert loads >= {"both", *(["async"] if has_async() else [])}


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("H", "I"), [(512, 384), (640, 896)])
@pytest.mark.parametrize("word", ["token", "static"])
def test_programs_that_go_from_tile_to_tile(
    word: str,
    H: int,
    I: int,  # noqa: E741
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loads run over the end of a tile, also over that of half ones, in 3 to 7 steps a tile."""
    if not has_async():
        pytest.skip("asynchronous products are Hopper's, by Triton 3.6 and 3.7")
    case = problem(5, T=500, H=H, I=I, E=6, K=2)
    share = torch.tensor([0.5, 0.06, 0.0, 0.2, 0.2, 0.04])
    torch.manual_seed(0)
    ids = torch.multinomial(share, 500, replacement=True)
    ids = torch.stack([ids, torch.where(torch.rand(500) < 0.1, -1, (ids + 3) % 6)], 1)
    case = with_scheme(case.with_(topk_ids=ids), word).to("cuda")
    expected = run_apart(case)
    monkeypatch.setattr(eager_variants.EagerHost, "multiprocessors", lambda host: programs)
    for pair in variant_tables.ASYNC_PAIRS:
        variant = Variant("fused", *pair)
        assert variant in found(case)
        with variants.forced(variant):
            for _ in range(3):
                assert torch.equal(case.run(), expected), variants.label(variant)


@pytest.mark.parametrize("T", [1, 300])
def test_dead_contributions_and_special_rows(T: int) -> None:
    case = sized(T)
    rows = case.hidden_states.clone()
    rows[0] = 0
    rows[-1, 3] = float("nan")
    ids = case.topk_ids.clone()
    ids[0, 1], ids[-1, 0] = -1, 99
    case = case.with_(hidden_states=rows, topk_ids=ids)
    expected = run_apart(case).nan_to_num(7.0)
    for variant in found(case):
        with variants.forced(variant):
            assert torch.equal(case.run().nan_to_num(7.0), expected), variants.label(variant)


@pytest.mark.parametrize("T", [1, 64, 1100])
def test_compiled_variants_equal_eager_ones(T: int) -> None:
    case = sized(T)
    expected = run_apart(case)
    for variant in (apart(case), *found(case)):
        torch._dynamo.reset()
        with variants.forced(variant), torch.no_grad():
            function = torch.compile(lambda *args: EXPERTS(*args), fullgraph=True, dynamic=False)
            assert torch.equal(function(*case.args), expected), variants.label(variant)


@pytest.mark.parametrize("T", [1, 300])
def test_cuda_graphs_follow_the_routing(T: int) -> None:
    for variant in found(sized(T)):
        case = sized(T)
        with variants.forced(variant):
            case.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = case.run()
        for seed in range(3):
            other = problem(100 + seed, T=T, H=512, I=384, E=8, K=2).to("cuda")
            case.hidden_states.copy_(other.hidden_states)
            case.topk_ids.copy_(other.topk_ids)
            case.topk_weights.copy_(other.topk_weights)
            graph.replay()
            assert torch.equal(out, run_apart(case)), variants.label(variant)


@pytest.mark.parametrize("T", [1, 7, 64, 1100])
def test_calls_in_a_row_wait_for_each_other(T: int) -> None:
    """Kernels start before those ahead end, in memory that the call before has just left."""
    cases = [problem(200 + seed, T=T, H=512, I=384, E=8, K=2).to("cuda") for seed in range(6)]
    expected = [run_apart(case) for case in cases]
    for variant in found(cases[0]):
        with variants.forced(variant):
            outs = [case.run() for _ in range(30) for case in cases]
        for turn, out in enumerate(outs):
            assert torch.equal(out, expected[turn % 6]), (variants.label(variant), turn)


@pytest.mark.parametrize("T", [1, 64, 1100])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_layers_of_one_graph_wait_for_each_other(T: int, mode: str) -> None:
    """The routing of both is computed in the graph, by the kernel ahead of the layer."""
    case = sized(T)
    weights, router_weights = case.args[1:5], case.topk_weights

    def layers(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        for turn in range(2):
            x = EXPERTS(x, *weights, router_weights, torch.topk(logits[turn], 2).indices)
        return x

    torch._dynamo.reset()
    with torch.no_grad():
        function = torch.compile(layers, fullgraph=True, mode=mode)
        for seed in range(40):
            torch.manual_seed(seed)
            logits = torch.randn(2, T, 8, device="cuda")
            x = torch.randn(T, 512, device="cuda", dtype=torch.bfloat16)
            out = function(x, logits).clone()
            for turn in range(2):
                ids = torch.topk(logits[turn], 2).indices
                x = run_apart(case.with_(hidden_states=x, topk_ids=ids))
            assert torch.equal(out, x), seed


def by_size() -> Schedule:
    """Return a schedule over all sizes: without routing, small tiles, tiles by descriptor."""
    few, middle, many = (found(sized(T)) for T in (2, 17, 1100))
    decode = next(v for v in few if v.name == "decode")
    small = next(v for v in middle if v.name == "fused" and v.up.loads == "pointers")
    large = [v for v in many if v.name == "fused"]
    described = next((v for v in large if v.up.loads == "both"), large[0])
    return Schedule(((16, decode), (256, small), (1 << 40, described)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("by", [by_size, None])
def test_one_graph_serves_all_sizes(by: Callable[[], Schedule] | None, mode: str) -> None:
    """One compilation; the number of tokens picks the kernels, also as the tables say (None)."""
    torch._dynamo.reset()
    case = sized(1100)
    weights = case.args[1:5]
    asked = contextlib.nullcontext() if by is None else variants.forced(by())
    with asked, torch.no_grad():
        function = torch.compile(
            lambda x, w, ids: EXPERTS(x, *weights, w, ids), fullgraph=True, mode=mode
        )
        for turn, tokens in enumerate((1100, 2, 17, 8, 9, 128, 129, 1000, 1, 2)):
            rows = case.rows(slice(0, tokens))
            args = [rows.hidden_states, rows.topk_weights, rows.topk_ids]
            if turn == 0:
                for tensor in args:
                    torch._dynamo.mark_dynamic(tensor, 0)
            limit = 0 if turn == 0 else torch._dynamo.utils.counters["stats"]["unique_graphs"]
            out = function(*args).clone()
            assert torch.equal(out, run_apart(rows)), tokens
            if turn and tokens > 1:
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == limit


def apart(case: Problem) -> Variant:
    """Return the kernels that take every call."""
    return eager.apart_variant(ExpertsArguments(*case.args, **case.options))


def run_apart(case: Problem) -> torch.Tensor:
    """Compute a case by the kernels that take every call."""
    with variants.forced(apart(case)):
        return case.run()


def test_a_graph_of_any_size_is_recorded_after_a_call_of_another() -> None:
    """What a small call does not launch is compiled by then: a recording could not do it."""
    torch._dynamo.reset()
    case = sized(1100)
    weights = case.args[1:5]
    function = torch.compile(lambda x, w, ids: EXPERTS(x, *weights, w, ids), fullgraph=True)
    with torch.no_grad():
        few = case.rows(slice(0, 40))
        args = [few.hidden_states, few.topk_weights, few.topk_ids]
        for tensor in args:
            torch._dynamo.mark_dynamic(tensor, 0)
        assert torch.equal(function(*args), run_apart(few))
        args = [case.hidden_states, case.topk_weights, case.topk_ids]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function(*args)
        graph.replay()
    assert torch.equal(out, run_apart(case))
