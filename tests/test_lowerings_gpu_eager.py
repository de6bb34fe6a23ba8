"""Eager CUDA calls of the operator against the reference, on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import CASES, Case
from support import Problem, assert_close, poison, problem, with_scheme

from int8moe_compile.lowerings import eager, tiles, variants

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_argument(case: Case) -> None:
    built = case.build()
    poison((64, 4096), (6, 64), device="cuda")
    assert_close(built.to("cuda").run(), built)


@pytest.mark.parametrize("experts", [1, 3, 60, 160, 512, 1024, 2048])
@pytest.mark.parametrize("spread", ["one each", "all on one"])
def test_number_of_experts(experts: int, spread: str) -> None:
    case = problem(1, T=7, E=experts, K=2)
    ids = torch.arange(14).reshape(7, 2) % experts
    if spread == "all on one":
        ids = torch.full((7, 2), experts - 1)
    case = case.with_(topk_ids=ids)
    assert_close(case.to("cuda").run(), case)


@pytest.mark.parametrize("H", [16, 33, 160, 704, 2880])
@pytest.mark.parametrize("I", [17, 96, 352, 1408])
def test_odd_sizes(H: int, I: int) -> None:  # noqa: E741
    case = problem(2, T=9, H=H, I=I, E=4)
    assert_close(case.to("cuda").run(), case)


@pytest.mark.parametrize("T", [1, 2, 60, 130, 1100])
@pytest.mark.parametrize("word", ["token", "static", "none"])
def test_numbers_of_tokens(T: int, word: str) -> None:
    case = with_scheme(problem(3, T=T, H=256, I=192, E=8, K=3), word)
    assert_close(case.to("cuda").run(), case)


@pytest.mark.parametrize("word", ["token", "static"])
def test_a_token_depends_on_itself_alone(word: str) -> None:
    case = with_scheme(problem(4, T=8192, H=128, I=96, E=4, K=2), word).to("cuda")
    whole = case.run()
    for start, tokens in ((0, 1), (5, 2), (17, 17), (100, 64), (7000, 1000)):
        part = slice(start, start + tokens)
        assert torch.equal(case.rows(part).run(), whole[part])
    order = torch.randperm(8192, device="cuda")
    assert torch.equal(case.rows(order).run(), whole[order])
    for _ in range(3):
        assert torch.equal(case.run(), whole)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("word", ["token", "static"])
def test_every_tile_gives_the_same_bits(block_m: int, word: str) -> None:
    """Whatever the tables or max-autotune choose: tables, candidates, grouping, stages, warps."""
    biases = {"w13_bias": torch.randn(4, 192), "w2_bias": torch.randn(4, 160)}
    case = problem(9, T=150, H=160, I=96, E=4, K=2, alpha=1.7, beta=1.0, limit=2.0, **biases)
    case = with_scheme(case, word).to("cuda")
    expected = case.run()
    device = eager.facts_of(torch.device("cuda", torch.cuda.current_device()))
    up, down = tiles.Product(300, 4, 160, 96, 2), tiles.Product(300, 4, 96, 160)
    tables = [*tiles.TABLE, *tiles.FEW_EXPERTS_TABLE]
    ups = {tiles.fit(row[1], up, device) for row in tables} | set(
        tiles.candidates(up, device, block_m)
    )
    downs = {tiles.fit(row[2], down, device) for row in tables} | set(
        tiles.candidates(down, device, block_m)
    )
    ups = {tile for tile in ups if tile.block_m == block_m}
    downs = {tile for tile in downs if tile.block_m == block_m}
    assert len(ups) > 1 and len(downs) > 1
    pairs = [(tile, min(downs, key=str)) for tile in ups]
    pairs += [(min(ups, key=str), tile) for tile in downs]
    for pair in pairs:
        with variants.forced(variants.Variant("apart", *pair)):
            assert torch.equal(case.run(), expected), pair


def test_no_synchronisation() -> None:
    case = problem(5, T=700, E=8).to("cuda")
    case.run()
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


def test_cuda_graph_follows_the_routing() -> None:
    case = problem(6, T=70, E=8).to("cuda")
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    for seed in range(3):
        other = problem(100 + seed, T=70, E=8).to("cuda")
        case.hidden_states.copy_(other.hidden_states)
        case.topk_ids.copy_(other.topk_ids)
        case.topk_weights.copy_(other.topk_weights)
        graph.replay()
        assert torch.equal(out, case.run())


def test_inputs_stay_and_results_are_fresh() -> None:
    case = problem(7, T=9).to("cuda")
    before = [tensor.clone() for tensor in case.args]
    first, second = case.run(), case.run()
    assert first.data_ptr() != second.data_ptr()
    for tensor, old in zip(case.args, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("word", ["token", "tensor", "static", "none"])
def test_no_tokens(word: str) -> None:
    case = with_scheme(problem(8, T=1), word).rows(slice(0, 0)).to("cuda")
    assert case.run().shape == (0, 64)


def test_the_integer_sum_is_exact() -> None:
    """B7, B8: permutations of ones give exact permuted integers, long sums do not wrap."""
    for size in (16, 32, 64, 128):
        first, second = torch.randperm(size), torch.randperm(size)
        eye = torch.eye(size, dtype=torch.int8)
        x = torch.randint(0, 4, (size, size), generator=torch.Generator().manual_seed(size))
        case = Problem(
            x.float(),
            eye[first][None],
            torch.ones(1, 1),
            eye[second][None],
            torch.ones(1, 1),
            torch.ones(size, 1),
            torch.zeros(size, 1, dtype=torch.int64),
            {"gated": False, "activation": "relu", "activation_quant": "static"},
        ).with_(a13_scale=torch.tensor(1.0), a2_scale=torch.tensor(1.0))
        assert torch.equal(case.to("cuda").run().cpu(), x.float()[:, first][:, second])
