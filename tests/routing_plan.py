"""What a routing plan must hold, whichever kernels made it."""

from __future__ import annotations

import torch
from torch import Tensor

from int8moe_compile.lowerings import routing, tiles
from int8moe_compile.ops.routing import local_experts


def assert_plan(
    plan: routing.Plan,
    ids: Tensor,
    *,
    num_experts: int,
    block_m: int,
    expert_map: Tensor | None = None,
) -> None:
    """Check order, local, tiles and inverse; which of an expert's comes first is free."""
    known = None if expert_map is None else expert_map.cpu()
    local = local_experts(ids.cpu(), num_experts, known).flatten()
    assert torch.equal(plan.local.cpu().long(), local)
    live = int((local >= 0).sum())
    order = plan.order.cpu()[:live].long()
    expected = torch.argsort(torch.where(local < 0, num_experts, local), stable=True)[:live]
    assert torch.equal(order.sort().values, expected.sort().values)
    assert torch.equal(local[order], local[expected])
    if plan.inverse is not None:
        assert torch.equal(plan.inverse.cpu()[order].long(), torch.arange(live))

    rows = tile_rows(torch.bincount(local[local >= 0], minlength=num_experts), block_m)
    found = plan.tiles.cpu()
    assert found[0].tolist() == [len(rows), live, 0]
    assert found[1 : 1 + len(rows)].tolist() == rows
    assert len(rows) <= plan.tile_bound
    assert plan.tile_bound == tiles.tile_bound(local.numel(), num_experts, block_m)


def tile_rows(counts: Tensor, block_m: int) -> list[list[int]]:
    """Return expert, first and end position of every tile of experts with so many rows."""
    rows, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        end = start + count
        rows += [[expert, at, min(at + block_m, end)] for at in range(start, end, block_m)]
        start = end
    return rows
