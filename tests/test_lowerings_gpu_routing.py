"""Routing plans made on a GPU, where atomics decide the order within an expert."""

from __future__ import annotations

import pytest
import torch
from routing_plan import assert_plan

from int8moe_compile.lowerings import routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("contributions", [8192, 8200, 32768, 131072, 131080, 1 << 20])
@pytest.mark.parametrize("experts", [1, 60, 128, 1000, 2048])
@pytest.mark.parametrize("spread", ["random", "one hot", "all on the last", "none"])
def test_plans(contributions: int, experts: int, spread: str) -> None:
    draw = torch.Generator().manual_seed(contributions + experts)
    ids = torch.randint(-1, experts + 1, (contributions // 8, 8), generator=draw)
    if spread == "one hot":
        ids[torch.rand(ids.shape, generator=draw) < 0.9] = experts // 2
    elif spread != "random":
        ids.fill_(experts - 1 if spread == "all on the last" else -1)
    there = ids.to("cuda")
    torch.use_deterministic_algorithms(True)  # torch.empty does not return zeros then
    try:
        for block_m in (16, 128):
            plan = routing.plan(
                there, None, num_experts=experts, block_m=block_m, is_inverse_wanted=True
            )
            assert_plan(plan, ids, num_experts=experts, block_m=block_m)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mapped_strided_ids(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(-2, 70, (6, 5001), generator=draw).to(dtype).T
    known = torch.randint(-1, 40, (64,), generator=draw)
    plan = routing.plan(
        ids.to("cuda"), known.to("cuda"), num_experts=33, block_m=64, is_inverse_wanted=True
    )
    assert_plan(plan, ids, num_experts=33, block_m=64, expert_map=known)


def test_repeated_plans() -> None:
    """A race between a chunk's zeros and its atomics would show now and then."""
    ids = torch.randint(0, 128, (16384, 8), generator=torch.Generator().manual_seed(1))
    there = ids.to("cuda")
    for _ in range(200):
        plan = routing.plan(there, None, num_experts=128, block_m=128, is_inverse_wanted=True)
        order = plan.order.long()
        assert torch.equal(order.sort().values, torch.arange(1 << 17, device="cuda"))
        assert bool((plan.local[order].diff() >= 0).all())
    assert_plan(plan, ids, num_experts=128, block_m=128)
