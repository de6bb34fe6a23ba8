"""Every eager kernel in Triton's interpreter; collected in a process of its own only.

TRITON_INTERPRET decides when a kernel is defined, so test_lowerings_interpreter.py starts this.
"""

from __future__ import annotations

import interpreter  # noqa: F401  (first: it sets TRITON_INTERPRET)
import pytest
import torch
from gpu_cases import CASES, Case
from support import Problem, assert_close, probe, problem

from int8moe_compile.lowerings import eager, routing, tiles
from int8moe_compile.ops.arguments import ExpertsArguments
from int8moe_compile.ops.routing import local_experts


def run(case: Problem) -> torch.Tensor:
    """Compute a case with the Triton kernels, interpreted."""
    return eager.experts(ExpertsArguments(*case.args, **case.options))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_argument(case: Case) -> None:
    built = case.build()
    assert_close(run(built), built)


@pytest.mark.parametrize("experts", [1, 3, 60, 160])
def test_number_of_experts(experts: int) -> None:
    case = problem(1, T=7, E=experts, K=2)
    one_each = case.with_(topk_ids=torch.arange(14).reshape(7, 2) % experts)
    all_on_one = case.with_(topk_ids=torch.full((7, 2), experts - 1))
    for each in (one_each, all_on_one):
        assert_close(run(each), each)


@pytest.mark.parametrize("sizes", [(16, 17), (35, 48), (160, 352), (192, 80), (704, 96)])
def test_odd_sizes(sizes: tuple[int, int]) -> None:
    case = problem(2, T=9, H=sizes[0], I=sizes[1], E=4)
    assert_close(run(case), case)


def test_ties_round_to_even() -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert run(probe(row)).tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_the_integer_sum_does_not_wrap() -> None:
    ones = torch.full((1, 1, 512), 127, dtype=torch.int8)
    case = Problem(
        torch.full((1, 512), 127.0),
        ones,
        torch.ones(1, 1),
        torch.ones(1, 512, 1, dtype=torch.int8),
        torch.ones(1, 1),
        torch.ones(1, 1),
        torch.zeros(1, 1, dtype=torch.int64),
        {"gated": False, "activation": "relu", "activation_quant": "static"},
    ).with_(a13_scale=torch.tensor(1.0), a2_scale=torch.tensor(512 * 127.0))
    assert run(case)[0, 0].item() == 512 * 127 * 127


@pytest.mark.parametrize(("T", "chunk"), [(1, 8192), (700, 8192), (700, 256)])
@pytest.mark.parametrize("block_m", [16, 128])
def test_routing(T: int, chunk: int, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "CHUNK", chunk)
    monkeypatch.setattr(routing, "BLOCK", 128)
    g = torch.Generator().manual_seed(T)
    ids = torch.randint(-2, 14, (T, 3), generator=g)
    plan = routing.plan(ids, None, num_experts=11, block_m=block_m)
    local = local_experts(ids, 11, None).flatten()
    assert torch.equal(plan.local.long(), local)
    live = int((local >= 0).sum())
    order = torch.argsort(torch.where(local < 0, 99, local), stable=True)[:live]
    assert torch.equal(plan.order[:live].long(), order)
    counts = torch.bincount(local[local >= 0], minlength=11)
    expected, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        for first in range(start, start + count, block_m):
            expected.append([expert, first, min(first + block_m, start + count)])
        start += count
    assert plan.tiles[0].tolist() == [len(expected), live, 0]
    assert plan.tiles[1 : 1 + len(expected)].tolist() == expected
    assert len(expected) <= tiles.tile_bound(3 * T, 11, block_m)


def test_a_token_depends_on_itself_alone() -> None:
    case = problem(3, T=24, E=2, K=2)
    whole = run(case)
    for part in (slice(0, 1), slice(3, 5), slice(7, 20)):
        assert torch.equal(run(case.rows(part)), whole[part])


def test_every_tile_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(4, T=9, H=96, I=64, E=2)
    expected = run(case)
    for tile in ((16, 32, 32), (32, 64, 128), (64, 64, 64)):
        pair = (tiles.Tile(*tile, 4, 2), tiles.Tile(tile[0], 64, 32, 4, 2, 4))
        monkeypatch.setattr(eager, "layer_tiles", lambda *args, pair=pair: pair)
        assert torch.equal(run(case), expected)
