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
    return torch.cuda.is_available() and variants._has_gluon(
        eager.facts_of(torch.device("cuda", torch.cuda.current_device()))
    )


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_kernel(), reason="needs Hopper, and Triton 3.6 or 3.7"),
]
PAIRS = variant_tables.STREAM_PAIRS


def chosen(case: Problem) -> Variant:
    """Return what the tables choose for a call."""
    call = ExpertsArguments(*case.args, **case.options)
    device = eager.facts_of(case.hidden_states.device)
    features = eager_variants.features_of(call)
    return variants.choose(*eager.layer_products(call), device, features)


def run_apart(case: Problem) -> torch.Tensor:
    """Return the result by the kernels that take every call."""
    call = ExpertsArguments(*case.args, **case.options)
    with variants.forced(eager.apart_variant(call)):
        return case.run()


def spoil(case: Problem) -> None:
    """Leave NaN where a call's buffers will be: what an earlier one computed must not be found."""
    contributions, (hidden, width) = case.topk_ids.numel(), case.w2.shape[1:]
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for size in (contributions * hidden, contributions * width, contributions):
            fill = float("nan") if dtype.is_floating_point else 99
            for _ in range(2):
                torch.full((size,), fill, dtype=dtype, device="cuda")


def check(case: Problem, pair: Any, repeats: int = 4) -> None:
    """Compare the bits of some runs, each of another routing."""
    variant = Variant("fused", *pair)
    call = ExpertsArguments(*case.args, **case.options)
    up, down = eager.layer_products(call)
    device = eager.facts_of(case.hidden_states.device)
    assert variants.takes(variant, up, down, device, eager_variants.features_of(call))
    for turn in range(repeats):
        case = case.with_(
            topk_ids=case.topk_ids.roll(turn, 0), topk_weights=case.topk_weights.roll(1)
        )
        expected = run_apart(case)
        spoil(case)
        with variants.forced(variant):
            assert torch.equal(case.run(), expected), turn


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("word", ["token", "static"])
@pytest.mark.parametrize(("H", "I"), [(512, 384), (528, 400), (640, 896), (384, 1168), (2048, 768)])
def test_every_size_gives_the_same_bits(H: int, I: int, word: str, pair: Any) -> None:  # noqa: E741
    """Depths and widths that no block divides, rows of the intermediate in one read and in two."""
    for T in (1, 9, 40, 150, 300):
        check(with_scheme(problem(T, T=T, H=H, I=I, E=8, K=2), word).to("cuda"), pair)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_dtype_gives_the_same_bits(dtype: torch.dtype, pair: Any) -> None:
    biases = {"w13_bias": torch.randn(8, 768), "w2_bias": torch.randn(8, 512)}
    # Some 17 rows an expert, and 70, of which a tile of 80 has two parts.
    for T in (70, 280):
        case = problem(4, T=T, H=512, I=384, E=8, K=2, dtype=dtype, alpha=1.7, beta=1.0, limit=2.0)
        check(case.with_(**biases).to("cuda"), pair)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("columns", [1, 2])
def test_every_weight_scale_gives_the_same_bits(columns: int, pair: Any) -> None:
    """One for a weight, or one each for gate and up."""
    case = problem(12, T=280, H=512, I=384, E=8, K=2)
    scales = {"w13_scale": torch.rand(8, columns) / 1000, "w2_scale": torch.rand(8, 1) / 1000}
    check(case.with_(**scales).to("cuda"), pair)


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
    found = []
    for T in (8, 100, 240, 400):
        case = problem(9, T=T, H=512, I=384, E=24, K=4).to("cuda")
        found.append(chosen(case).up.block_m)
        expected = run_apart(case)
        assert all(torch.equal(case.run(), expected) for _ in range(4))
    assert found == [16, 32, 64, 80]


@pytest.mark.parametrize("pair", PAIRS)
def test_launches_in_turn_give_the_same_bits(pair: Any) -> None:
    with variants.in_turn():
        check(problem(10, T=60, H=512, I=384, E=8, K=2).to("cuda"), pair)


@pytest.mark.parametrize("word", ["token", "static"])
def test_weights_that_the_graph_computes_are_waited_for(word: str) -> None:
    """Nothing of them is asked for before the kernels ahead have ended."""
    case = with_scheme(problem(11, T=60, H=512, I=384, E=16, K=4), word).to("cuda")

    def layer(w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return case.with_(w13=-w13, w2=w2.roll(1, 1)).run()

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True)
        expected = run_apart(case.with_(w13=-case.w13, w2=case.w2.roll(1, 1)))
        for _ in range(5):
            assert torch.equal(compiled(case.w13, case.w2), expected)


@pytest.mark.parametrize(
    "sizes", [(40,), (240,), (400,), (3, 48, 49, 144, 145, 300, 301, 432, 433)]
)
def test_graphs_give_the_same_bits(sizes: tuple[int, ...]) -> None:
    """Compiled, by the tables: for one size, and for any on both sides of every step."""
    case = problem(8, T=433, H=512, I=384, E=24, K=4).to("cuda")
    tiles = [chosen(case.rows(slice(0, T))).up for T in (48, 144, 300, 432, 433)]
    assert [tile.block_m for tile in tiles] == [16, 32, 64, 80, 128]

    def layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return case.with_(hidden_states=x, topk_weights=weights, topk_ids=ids).run()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=len(sizes) > 1)
    for T in sizes:
        part = case.rows(slice(0, T))
        with torch.no_grad():
            found = compiled(part.hidden_states, part.topk_weights, part.topk_ids)
        assert torch.equal(found, run_apart(part)), T
