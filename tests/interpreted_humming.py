"""The whole humming layer in Triton's interpreter, with a humming that computes in PyTorch.

Collected in a process of its own only, see interpreted.py.
"""

from __future__ import annotations

import fake_humming
import interpreter  # noqa: F401  (first: it sets TRITON_INTERPRET)
import pytest
import torch
from support import Problem, assert_close, problem

from int8moe_compile.lowerings import humming
from int8moe_compile.ops.arguments import ExpertsArguments


def run(case: Problem) -> torch.Tensor:
    """Compute a case with the fake products and the interpreted kernels around them."""
    return humming.experts(ExpertsArguments(*case.args, **case.options))


def check(case: Problem, block_m: int = 16) -> None:
    """Hold a case to the reference that rounds where humming does."""
    with fake_humming.installed(block_m) as fake:
        out = run(case)
    assert fake.launches == 2
    with fake_humming.meaning():
        assert_close(out, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(64, 48), (16, 16), (256, 128), (160, 1040)])
def test_sizes(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    check(problem(1, T=7, H=sizes[0], I=sizes[1], E=3, K=2, dtype=dtype))


@pytest.mark.parametrize("block_m", [8, 40, 64])
@pytest.mark.parametrize("T", [1, 70])
def test_tiles_and_tokens(block_m: int, T: int) -> None:
    check(problem(2, T=T, H=32, I=16, E=5, K=2), block_m)


def test_gates_of_other_numbers() -> None:
    check(problem(3, T=9, I=48, alpha=1.702, beta=1.0, limit=0.5))


def test_dead_and_mapped_ids() -> None:
    ids = torch.tensor([[0, 1], [2, 3], [2, -1], [-1, -1], [7, 0], [2**40, 2]])
    case = problem(4, T=6)
    weights = case.topk_weights.clone()
    weights[(ids < 0) | (ids > 3)] = float("nan")
    check(case.with_(topk_ids=ids, topk_weights=weights))
    check(problem(4, T=6, E=2).with_(topk_ids=ids, expert_map=torch.tensor([0, -1, 1, -1])))


def test_nobody_lives() -> None:
    case = problem(4, T=3)
    case = case.with_(topk_ids=torch.full_like(case.topk_ids, -1))
    with fake_humming.installed():
        assert torch.equal(run(case), torch.zeros(3, 64, dtype=torch.bfloat16))


def test_no_tokens_launch_nothing() -> None:
    with fake_humming.installed() as fake:
        out = run(problem(4, T=0))
    assert out.shape == (0, 64) and fake.launches == 0


def test_codes_router_weights_on_input_strides_and_output_dtypes() -> None:
    g = torch.Generator().manual_seed(5)
    codes = torch.randint(-128, 128, (6, 64), generator=g, dtype=torch.int8)
    given = problem(5, T=6).with_(hidden_states=codes, a13_scale=torch.rand(6, generator=g) / 50)
    check(given)
    check(problem(6, T=6, K=1, apply_router_weight_on_input=True))
    check(problem(7, T=6, dtype=torch.float32, out_dtype=torch.float16))
    case = problem(8, T=6)
    check(
        case.with_(
            hidden_states=case.hidden_states.t().contiguous().t(),
            topk_ids=case.topk_ids.t().contiguous().t(),
            topk_weights=case.topk_weights.to(torch.bfloat16).t().contiguous().t(),
            w13_scale=case.w13_scale.unsqueeze(-1),
            w13=torch.cat([case.w13, case.w13], -1)[..., :64],
        )
    )


def test_nonfinite_values_stay_with_their_token() -> None:
    case = problem(7, T=6)
    rows = case.hidden_states.clone()
    rows[1], rows[2, 5], rows[4, 3] = 0, 1e4, float("nan")
    check(case.with_(hidden_states=rows))


def test_a_token_depends_on_itself_alone() -> None:
    case = problem(3, T=24, E=2, K=2)
    with fake_humming.installed() as fake:
        whole = run(case)
        for part in (slice(0, 1), slice(3, 5), slice(7, 20)):
            assert torch.equal(run(case.rows(part)), whole[part])
    assert all(compute["use_batch_invariant"] for _, compute, _ in fake.compiled)


def test_scales_of_very_different_channels() -> None:
    case = problem(9, T=5, E=3)
    spread = torch.logspace(-6, 0, case.w13_scale.shape[1])
    check(case.with_(w13_scale=case.w13_scale * spread))
