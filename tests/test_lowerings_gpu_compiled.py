"""The lowering on a GPU: compiled calls equal eager ones bit for bit, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import CASES, Case
from support import EXPERTS, Problem, problem, with_scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def compiled(case: Problem, *, dynamic: bool = False, **options: Any) -> torch.Tensor:
    """Run a case through torch.compile in a fresh Dynamo."""
    torch._dynamo.reset()
    function = torch.compile(
        lambda *args: EXPERTS(*args, **case.options), fullgraph=True, dynamic=dynamic, **options
    )
    args = list(case.args)
    if dynamic:
        for index in (0, 5, 6):
            torch._dynamo.mark_dynamic(args[index], 0)
    with torch.no_grad():
        result: torch.Tensor = function(*args)
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_argument_equals_eager(case: Case) -> None:
    built = case.build().to("cuda")
    assert torch.equal(compiled(built).nan_to_num(7.0), built.run().nan_to_num(7.0))


@pytest.mark.parametrize("word", ["token", "tensor", "static", "none"])
def test_one_graph_for_all_numbers_of_tokens(word: str) -> None:
    torch._dynamo.reset()
    case = with_scheme(problem(1, T=1100, H=256, I=192, E=8, K=3), word).to("cuda")
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    function = torch.compile(
        lambda x, weights, ids: EXPERTS(x, *case.args[1:5], weights, ids, **case.options),
        backend=count,
        fullgraph=True,
    )
    for tokens in (1100, 2, 17, 64, 300, 1000):
        rows = case.rows(slice(0, tokens))
        args = [rows.hidden_states, rows.topk_weights, rows.topk_ids]
        if graphs == 0:
            for tensor in args:
                torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            out = function(*args)
        if word == "none":
            torch.testing.assert_close(out, rows.run(), rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(out, rows.run())
    assert graphs == 1


def test_int8_rows_of_many_tokens() -> None:
    """Where the kernels of many rows take rows that are codes already."""
    case = problem(4, T=600, H=256, I=128, E=8, K=2).to("cuda")
    codes = torch.randint(-127, 128, (600, 256), dtype=torch.int8, device="cuda")
    scale = torch.rand(600, 1, device="cuda") * 1e-2
    case = case.with_(hidden_states=codes, a13_scale=scale)
    assert torch.equal(compiled(case), case.run())
    assert torch.equal(compiled(case, dynamic=True), case.run())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_norm_behind_the_sum_reads_what_was_written(dynamic: bool) -> None:
    """A kernel that sums slots, adds and normalises reads its own sums again in a second loop."""
    torch._dynamo.reset()
    case = problem(9, T=2048, H=192, I=64, E=16, K=2).to("cuda")
    scale = torch.rand(192, device="cuda", dtype=torch.bfloat16)

    def function(x: torch.Tensor) -> torch.Tensor:
        wide = (x + EXPERTS(x, *case.args[1:], **case.options)).float()
        return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    run = torch.compile(function, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        expected = function(case.hidden_states)
        for _ in range(20):
            torch.testing.assert_close(run(case.hidden_states), expected, rtol=2e-2, atol=2e-2)


def test_fused_neighbours_change_no_bit() -> None:
    """The norm's bf16 result is what gets quantised, fused or not."""
    case = problem(2, T=65, H=512, I=256, E=8, K=2).to("cuda")
    scale = torch.rand(512, device="cuda", dtype=torch.bfloat16)

    def norm(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scale * wide.to(x.dtype)

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = norm(x)
        return x + EXPERTS(y, *case.args[1:], **case.options), y

    torch._dynamo.reset()
    with torch.no_grad():
        out, y = torch.compile(block, fullgraph=True)(case.hidden_states)
        expected = case.hidden_states + case.with_(hidden_states=y).run()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes(mode: str) -> None:
    torch._dynamo.reset()
    case = problem(3, T=64, H=256, I=192, E=8, K=3).to("cuda")
    function = torch.compile(
        lambda x, weights, ids: EXPERTS(x, *case.args[1:5], weights, ids), mode=mode
    )
    for seed in range(4):
        other = problem(50 + seed, T=64, H=256, I=192, E=8, K=3).to("cuda")
        rows = case.with_(
            hidden_states=other.hidden_states,
            topk_weights=other.topk_weights,
            topk_ids=other.topk_ids,
        )
        with torch.no_grad():
            out = function(rows.hidden_states, rows.topk_weights, rows.topk_ids).clone()
        assert torch.equal(out, rows.run())
