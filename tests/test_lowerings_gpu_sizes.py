"""Sizes whose offsets pass 2**31, memory and host behaviour of the CUDA kernels, on a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support import EXPERTS, Problem, problem, with_scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(
    T: int,
    H: int,
    I: int,  # noqa: E741
    E: int,
    K: int,
    **options: Any,
) -> Problem:
    """Build a problem on the GPU itself: these are too large to draw on the host."""
    torch.manual_seed(0)
    codes = {"dtype": torch.int8, "device": "cuda"}
    return Problem(
        torch.randn(T, H, device="cuda", dtype=torch.bfloat16),
        torch.randint(-127, 128, (E, 2 * I, H), **codes),
        torch.rand(E, 2 * I, device="cuda") / (60 * H**0.5),
        torch.randint(-127, 128, (E, H, I), **codes),
        torch.rand(E, H, device="cuda") / (60 * I**0.5),
        torch.rand(T, K, device="cuda"),
        torch.randint(0, E, (T, K), device="cuda"),
        options,
    )


def compiled(case: Problem) -> torch.Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        function = torch.compile(lambda *args: EXPERTS(*args, **case.options), fullgraph=True)
        result: torch.Tensor = function(*case.args)
    return result


@pytest.mark.parametrize("run", [Problem.run, compiled], ids=["eager", "compiled"])
def test_rows_beyond_two_to_the_31(run: Any) -> None:
    """D1: 320,000 contributions of 7168 columns."""
    case = on_gpu(T=40_000, H=7168, I=32, E=8, K=8)
    out = run(case)
    last = slice(40_000 - 64, None)
    assert torch.equal(out[last], case.rows(last).run())


@pytest.mark.parametrize("run", [Problem.run, compiled], ids=["eager", "compiled"])
def test_experts_beyond_two_to_the_31(run: Any) -> None:
    """D2: expert 511 of weights of 4 GiB."""
    case = on_gpu(T=4, H=4096, I=1024, E=512, K=1)
    case = case.with_(topk_ids=torch.full((4, 1), 511, device="cuda"))
    alone = case.with_(
        w13=case.w13[511:],
        w13_scale=case.w13_scale[511:],
        w2=case.w2[511:],
        w2_scale=case.w2_scale[511:],
        topk_ids=torch.zeros_like(case.topk_ids),
    )
    assert torch.equal(run(case), alone.run())


@pytest.mark.parametrize("run", [Problem.run, compiled], ids=["eager", "compiled"])
def test_wide_intermediates(run: Any) -> None:
    """D3: 65,536 contributions of 17,408 columns."""
    case = on_gpu(T=32_768, H=64, I=17_408, E=2, K=2)
    out = run(case)
    assert torch.equal(out[-1:], case.rows(slice(-1, None)).run())


@pytest.mark.parametrize("compile_it", [False, True])
def test_weight_only_never_holds_float_weights(compile_it: bool) -> None:
    """D11: the memory beside the inputs stays below a tenth of the weights."""
    case = on_gpu(T=1, H=2048, I=768, E=128, K=8, activation_quant="none")
    run = compiled if compile_it else Problem.run
    run(case)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(case)
    weights = case.w13.numel() + case.w2.numel()
    assert torch.cuda.max_memory_allocated() - before < 0.1 * weights


def test_default_mode_times_nothing() -> None:
    """D9: tiles are timed with max-autotune only, and give equal results."""
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    case = problem(1, T=64, H=256, I=192, E=8, K=3).to("cuda")
    with mock.patch.object(
        AlgorithmSelectorCache, "make_benchmark_fn", side_effect=AssertionError("timed")
    ):
        out = compiled(case)
    assert torch.equal(out, case.run())


@pytest.mark.parametrize("word", ["token", "tensor", "static", "none"])
def test_tiles_are_timed_for_every_scheme(word: str) -> None:
    """A13: max-autotune builds its inputs the way the operator does."""
    case = with_scheme(problem(2, T=8, H=64, I=32, E=4), word).to("cuda")
    torch._dynamo.reset()
    function = torch.compile(
        lambda *args: EXPERTS(*args, **case.options), options={"max_autotune": True}
    )
    with torch.no_grad():
        out = function(*case.args)
    if word == "none":
        torch.testing.assert_close(out, case.run(), rtol=2e-2, atol=2e-2)
    else:
        assert torch.equal(out, case.run())


@pytest.mark.parametrize("T", [16, 1024, 16384])
def test_between_linears_in_cuda_graphs(T: int) -> None:
    """E8: replays with changed inputs equal eager."""
    case = on_gpu(T=T, H=256, I=128, E=8, K=2)
    before = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    after = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)

    def layers(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return after(EXPERTS(before(x), *case.args[1:5], weights, ids))

    torch._dynamo.reset()
    function = torch.compile(layers, mode="reduce-overhead", fullgraph=True)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(T, 256, device="cuda", dtype=torch.bfloat16)
        weights = torch.rand(T, 2, device="cuda")
        ids = torch.randint(0, 8, (T, 2), device="cuda")
        with torch.no_grad():
            out = function(x, weights, ids).clone()
            torch.testing.assert_close(out, layers(x, weights, ids), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_is_used() -> None:
    """E13: cuda:1 while cuda:0 is current."""
    case = problem(3, T=9)
    expected = case.to("cuda:0").run().cpu()
    there = case.to("cuda:1")
    assert torch.equal(there.run().cpu(), expected)
    assert torch.equal(compiled(there).cpu(), expected)
    with pytest.raises(ValueError, match="topk_ids"):
        there.with_(topk_ids=case.topk_ids.to("cuda:0")).run()
