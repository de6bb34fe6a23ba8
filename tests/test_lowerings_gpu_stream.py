"""Both products in one launch on a GPU: the same bits as by all other kernels, and never stuck."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support import Problem, problem, with_scheme

from int8moe_compile.lowerings import eager, eager_variants, variant_tables, variants
from int8moe_compile.lowerings.variants import Variant
from int8moe_compile.ops.arguments import ExpertsArguments


def has_kernel() -> bool:
    """Say whether this GPU and Triton have the kernel."""
    return torch.cuda.is_available() and variants._has_async(
        eager.facts_of(torch.device("cuda", torch.cuda.current_device()))
    )


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_kernel(), reason="needs Hopper, and Triton 3.6 or 3.7"),
]
PAIRS = variant_tables.STREAM_PAIRS


def run_apart(case: Problem) -> torch.Tensor:
    """Return the result by the kernels that take every call."""
    call = ExpertsArguments(*case.args, **case.options)
    with variants.forced(eager.apart_variant(call)):
        return case.run()


def check(case: Problem, pair: Any, repeats: int = 4) -> None:
    """Compare the bits of some runs."""
    expected = run_apart(case)
    variant = Variant("fused", *pair)
    call = ExpertsArguments(*case.args, **case.options)
    up, down = eager.layer_products(call)
    device = eager.facts_of(case.hidden_states.device)
    assert variants.takes(variant, up, down, device, eager_variants.features_of(call))
    with variants.forced(variant):
        for _ in range(repeats):
            assert torch.equal(case.run(), expected)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("word", ["token", "static"])
@pytest.mark.parametrize(("H", "I"), [(512, 384), (528, 400), (640, 896), (384, 1168), (2048, 768)])
def test_every_size_gives_the_same_bits(H: int, I: int, word: str, pair: Any) -> None:  # noqa: E741
    """Depths and widths that no block divides, rows of the intermediate in one read and in two."""
    for T in (1, 9, 40, 150):
        check(with_scheme(problem(T, T=T, H=H, I=I, E=8, K=2), word).to("cuda"), pair)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_dtype_gives_the_same_bits(dtype: torch.dtype, pair: Any) -> None:
    biases = {"w13_bias": torch.randn(8, 768), "w2_bias": torch.randn(8, 512)}
    case = problem(4, T=70, H=512, I=384, E=8, K=2, dtype=dtype, alpha=1.7, beta=1.0, limit=2.0)
    check(case.with_(**biases).to("cuda"), pair)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("programs", [1, 2, 5])
def test_few_programs_do_it_all(programs: int, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program alone waits for nothing that only another one could begin."""
    ids = torch.randint(0, 6, (200, 3)).where(torch.rand(200, 3) > 0.1, -1)
    ids[:, 0] = 2
    case = problem(5, T=200, H=640, I=896, E=7, K=3).with_(topk_ids=ids).to("cuda")
    monkeypatch.setattr(eager_variants.EagerHost, "multiprocessors", lambda host: 1)
    check(case, [dataclasses.replace(tile, programs=programs) for tile in pair])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("live", [0, 1])
def test_hardly_anything_is_live(live: int, pair: Any) -> None:
    ids = torch.full((20, 2), -1)
    ids[:live] = 3
    check(problem(6, T=20, H=512, I=384, E=8, K=2).with_(topk_ids=ids).to("cuda"), pair)


def test_two_streams_get_along() -> None:
    """Launches beside each other share the GPU; none waits for programs that have no room."""
    case = problem(7, T=256, H=2048, I=768, E=64, K=8).to("cuda")
    expected = run_apart(case)
    variant = Variant("fused", *PAIRS[1])
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    with variants.forced(variant):
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(case.run())
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_repeated_calls_give_the_same_bits() -> None:
    """By the tables; from the second one on they are launched without being checked again."""
    for T in (8, 40, 150):
        case = problem(9, T=T, H=512, I=384, E=16, K=4).to("cuda")
        expected = run_apart(case)
        assert all(torch.equal(case.run(), expected) for _ in range(4))


@pytest.mark.parametrize("sizes", [(40,), (3, 32, 33, 96, 97, 400)])
def test_graphs_give_the_same_bits(sizes: tuple[int, ...]) -> None:
    """Compiled, by the tables: for one size, and for any on both sides of every step."""
    case = problem(8, T=400, H=512, I=384, E=16, K=4).to("cuda")

    def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return case.with_(hidden_states=x, topk_weights=weights, topk_ids=ids).run()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=len(sizes) > 1)
    for T in sizes:
        part = case.rows(slice(0, T))
        with torch.no_grad():
            found = compiled(part.hidden_states, part.topk_weights, part.topk_ids)
        assert torch.equal(found, run_apart(part)), T
