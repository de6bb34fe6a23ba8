"""Every eager kernel in Triton's interpreter; collected in a process of its own only.

TRITON_INTERPRET decides when a kernel is defined, so test_lowerings_interpreter.py starts this.
"""

from __future__ import annotations

import interpreter  # noqa: F401  (first: it sets TRITON_INTERPRET)
import pytest
import torch
from code_values import check_exponentials, converted
from gpu_cases import CASES, Case
from support import Problem, assert_close, probe, problem

from int8moe_compile.lowerings import eager, tiles, variants
from int8moe_compile.ops.arguments import ExpertsArguments


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_becomes_its_float(dtype: torch.dtype) -> None:
    assert torch.equal(converted(dtype, "cpu", is_packed=False), torch.arange(-128, 128).to(dtype))


def test_exp_keeps_to_two_units() -> None:
    check_exponentials("cpu")


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


def test_a_token_depends_on_itself_alone() -> None:
    case = problem(3, T=24, E=2, K=2)
    whole = run(case)
    for part in (slice(0, 1), slice(3, 5), slice(7, 20)):
        assert torch.equal(run(case.rows(part)), whole[part])


def test_every_tile_gives_the_same_bits() -> None:
    case = problem(4, T=9, H=96, I=64, E=2)
    expected = run(case)
    for tile in ((16, 32, 32), (32, 64, 128), (64, 64, 64)):
        pair = (tiles.Tile(*tile, 4, 2), tiles.Tile(tile[0], 64, 32, 4, 2, 4))
        with variants.forced(variants.Variant("apart", *pair)):
            assert torch.equal(run(case), expected)
