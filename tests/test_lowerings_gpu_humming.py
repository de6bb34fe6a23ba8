"""humming as a backend on a GPU, with humming-kernels itself: eager, compiled, in CUDA graphs.

Every shape and number of rows an expert is two compilations of CUDA C++: few of them here.
"""

from __future__ import annotations

import gc
import importlib.util
from typing import Any
from unittest import mock

import fake_humming
import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, run
from support import Problem, assert_close, poison, problem, row_errors
from test_families_models import BOUNDS
from test_passes_experts import Nothing

import int8moe_compile
from int8moe_compile.lowerings import humming as layer
from int8moe_compile.lowerings import humming_weights
from int8moe_compile.passes.joint import ExpertsPass
from int8moe_compile.quantization import quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="needs humming-kernels"),
]
HUMMING = torch.ops.int8moe.humming_experts.default


@pytest.fixture(autouse=True)
def _only_living_weights() -> None:
    gc.collect()


def humming(case: Problem) -> torch.Tensor:
    """Run a case on the GPU, with buffers of NaN to be reused."""
    there = case.to("cuda")
    poison((64, 4096), (6, 64), device="cuda")
    out: torch.Tensor = HUMMING(*there.args, **there.options)
    return out


def check(case: Problem) -> None:
    """Hold a case to the reference that rounds where humming does."""
    out = humming(case)
    with fake_humming.meaning():
        assert_close(out, case)


@pytest.mark.parametrize("T", [1, 70, 600])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((64, 48), torch.bfloat16),
        ((256, 128), torch.float16),
        ((2048, 768), torch.bfloat16),
    ],
)
def test_sizes_and_tokens(sizes: tuple[int, int], dtype: torch.dtype, T: int) -> None:
    check(problem(1, T=T, H=sizes[0], I=sizes[1], E=4, K=2, dtype=dtype))


def test_ids_that_do_not_count_and_a_map() -> None:
    case = problem(4, T=70, H=64, I=48)
    ids = case.topk_ids.clone()
    ids[3], ids[5, 1], ids[7, 0] = -1, 9, 2**40
    weights = case.topk_weights.clone()
    weights[(ids < 0) | (ids > 3)] = float("nan")
    check(case.with_(topk_ids=ids, topk_weights=weights))
    check(case.with_(topk_ids=ids, expert_map=torch.tensor([2, -1, 0, 3])))
    dead = case.with_(topk_ids=torch.full_like(ids, -1))
    assert torch.equal(humming(dead).cpu(), torch.zeros(70, 64, dtype=torch.bfloat16))


def test_gates_codes_and_router_weights_on_input() -> None:
    check(problem(5, T=70, H=64, I=48, alpha=1.702, beta=1.0, limit=0.5))
    case = problem(5, T=70, H=64, I=48)
    codes = torch.arange(70 * 64).reshape(70, 64).to(torch.int8)
    check(case.with_(hidden_states=codes, a13_scale=torch.rand(70, 1) / 50))
    check(problem(6, T=140, H=64, I=48, K=1, apply_router_weight_on_input=True))
    check(case.with_(topk_ids=torch.ones_like(case.topk_ids)))


def test_nonfinite_values_stay_with_their_token() -> None:
    case = problem(7, T=70, H=64, I=48)
    rows = case.hidden_states.clone()
    rows[1], rows[2, 5], rows[4, 3] = 0, 1e4, float("nan")
    check(case.with_(hidden_states=rows))


def test_a_token_depends_on_itself_alone() -> None:
    case = problem(1, T=600, H=2048, I=768, E=4, K=2).to("cuda")
    whole = HUMMING(*case.args)
    for part in (slice(0, 1), slice(30, 100)):
        assert torch.equal(HUMMING(*case.rows(part).args), whole[part])
    order = torch.randperm(600, device="cuda")
    assert torch.equal(HUMMING(*case.rows(order).args), whole[order])


def test_it_is_near_the_other_backend() -> None:
    """The contract rounds gate and up once fewer, so codes of the intermediate differ by one."""
    case = problem(1, T=600, H=2048, I=768, E=4, K=2).to("cuda")
    errors = row_errors(HUMMING(*case.args), case.run())
    print("largest and mean row error between humming and triton:", errors.amax(), errors.mean())
    # Eight units in the last place of bf16.
    assert float(errors.amax()) < 8 * 2**-8


def test_written_weights_are_converted_again_and_dropped_ones_freed() -> None:
    case = problem(8, T=70, H=64, I=48).to("cuda")
    before, held = HUMMING(*case.args), len(humming_weights._converted)
    case.w13.neg_()
    case.w2_scale.mul_(2)
    after = HUMMING(*case.args)
    assert not torch.equal(before, after) and len(humming_weights._converted) == held
    with fake_humming.meaning():
        assert_close(after, case.to("cpu"))
    del case
    gc.collect()
    assert len(humming_weights._converted) == held - 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_calls_give_the_same_bits(mode: str | None, dynamic: bool) -> None:
    torch._dynamo.reset()
    case = problem(9, T=70, H=64, I=48).to("cuda")
    weights = case.args[1:5]

    def function(x: torch.Tensor, routing: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return HUMMING(x * 2, *weights, routing, ids) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, mode=mode)
    inputs = (case.hidden_states, case.topk_weights, case.topk_ids)
    with torch.inference_mode():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*inputs), function(*inputs))
        if dynamic:
            fewer = tuple(tensor[:33].clone() for tensor in inputs)
            assert torch.equal(compiled(*fewer), function(*fewer))


def test_a_users_own_cuda_graph() -> None:
    case = problem(10, T=70, H=64, I=48).to("cuda")
    graph, x = torch.cuda.CUDAGraph(), case.hidden_states
    other = torch.randn_like(x)
    expected = [HUMMING(each, *case.args[1:]) for each in (x.clone(), other)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = HUMMING(*case.args)
    graph.replay()
    assert torch.equal(out, expected[0])
    x.copy_(other)
    graph.replay()
    assert torch.equal(out, expected[1])


def test_unconverted_weights_are_refused_in_a_capture() -> None:
    case = problem(11, T=70, H=64, I=48).to("cuda")
    with (
        pytest.raises(RuntimeError, match="which a CUDA graph cannot record"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        HUMMING(*case.args)


def test_a_layer_of_a_model_runs_by_it_when_asked() -> None:
    kind = hf_models.experts_class("Qwen3MoeExperts")
    experts: Any = quantize_(hf_models.build_experts(kind, dtype=torch.bfloat16).cuda())
    inputs = [tensor.cuda() for tensor in hf_models.routed(dtype=torch.bfloat16)]
    got = run(experts, *inputs, experts_pass=ExpertsPass("humming"))
    floats = run(experts, *inputs, experts_pass=Nothing()).result
    assert [outcome.backend for outcome in got.outcomes] == ["humming"], got.reasons
    assert len(got.calls(HUMMING)) == 1 and not got.calls(EXPERTS) and not got.calls(MARKER)
    assert hf_models.relative_error(got.result, floats) < BOUNDS["w8a8"]
    torch._dynamo.reset()
    with (
        int8moe_compile.enabled("humming"),
        torch.inference_mode(),
        mock.patch.object(layer, "multiply", wraps=layer.multiply) as multiply,
    ):
        out = torch.compile(experts, fullgraph=True)(*inputs)
    assert multiply.call_count == 2
    assert float(row_errors(out, got.result).amax()) < 8 * 2**-8


def test_an_eager_layer_runs_by_it_when_asked() -> None:
    kind = hf_models.experts_class("Qwen3MoeExperts")
    experts = quantize_(
        hf_models.build_experts(kind, dtype=torch.bfloat16, implementation="int8moe").cuda()
    )
    inputs = [tensor.cuda() for tensor in hf_models.routed(dtype=torch.bfloat16)]
    with (
        torch.inference_mode(),
        mock.patch.object(layer, "multiply", wraps=layer.multiply) as multiply,
    ):
        other = experts(*inputs)
        assert multiply.call_count == 0
        with int8moe_compile.enabled("humming"):
            mine = experts(*inputs)
    assert multiply.call_count == 2
    assert float(row_errors(mine, other).amax()) < 8 * 2**-8
