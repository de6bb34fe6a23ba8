"""Plan which rows meet which expert: launches of the routing kernels, sized without looking.

T tokens, K experts per token, E local experts. Every buffer has its static upper bound, so that
nothing is read back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import routing_kernels as kernels
from .tiles import tile_bound

# Contributions that one program counts or searches; up to so many need a single launch.
CHUNK = 8192
# Contributions that a program looks at in one step.
BLOCK = 2048
LEAST_BLOCK = 128
LEAST_BINS = 128
# Elements of a step that one thread takes.
THREAD_ELEMENTS = 8


@dataclass(frozen=True)
class Plan:
    """Hold the expert order of T*K contributions.

    order: int32 [T*K], position -> contribution, as many as are live. local: int32 [T*K], the
    expert of each contribution or -1. tiles: int32 [1 + tile_bound, 3], see routing_kernels.
    inverse: int32 [T*K], contribution -> position, where asked for.
    """

    order: Tensor
    local: Tensor
    tiles: Tensor
    inverse: Tensor | None = None

    @property
    def contributions(self) -> int:
        """Return T*K."""
        return self.local.shape[0]

    @property
    def tile_bound(self) -> int:
        """Return the most tiles that any routing of this size can need."""
        return self.tiles.shape[0] - 1


def plan(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    *,
    num_experts: int,
    block_m: int,
    is_inverse_wanted: bool = False,
) -> Plan:
    """Launch the routing of T*K > 0 contributions on the current device; one or two kernels."""
    contributions, top_k = topk_ids.numel(), topk_ids.shape[1]
    device = topk_ids.device
    order = torch.empty(contributions, dtype=torch.int32, device=device)
    local = torch.empty(contributions, dtype=torch.int32, device=device)
    bound = tile_bound(contributions, num_experts, block_m)
    tiles = torch.empty((1 + bound, 3), dtype=torch.int32, device=device)
    inverse = torch.empty_like(order) if is_inverse_wanted else None

    sizes = launch_sizes(contributions, num_experts)
    chunks = triton.cdiv(contributions, CHUNK)
    counts = torch.empty((chunks, sizes["BINS"]), dtype=torch.int32, device=device)
    map_size = 0 if expert_map is None else expert_map.numel()
    if expert_map is not None:
        expert_map = expert_map.contiguous()
    shape = (top_k, num_experts, map_size, *topk_ids.stride())
    options = {
        "HAS_MAP": expert_map is not None,
        "IS_FLAT": topk_ids.is_contiguous(),
        "CHUNK": CHUNK,
        "BLOCK": sizes["BLOCK"],
        "BINS": sizes["BINS"],
        "num_warps": sizes["NUM_WARPS"],
    }
    if chunks > 1:
        kernels.count_kernel[(chunks,)](
            counts, local, topk_ids, expert_map, contributions, *shape, **options
        )
    kernels.place_kernel[(chunks * num_experts,)](
        order,
        local,
        tiles,
        counts,
        inverse,
        topk_ids,
        expert_map,
        contributions,
        chunks,
        *shape,
        ONE_CHUNK=chunks == 1,
        STEP=sizes["STEP"],
        BLOCK_M=block_m,
        HAS_INVERSE=is_inverse_wanted,
        **options,
    )
    return Plan(order, local, tiles, inverse)


def launch_sizes(contributions: int, num_experts: int) -> dict[str, int]:
    """Return a step's contributions, columns of the table of counts, its rows read at a time."""
    bins = max(LEAST_BINS, triton.next_power_of_2(num_experts))
    block = max(LEAST_BLOCK, min(BLOCK, triton.next_power_of_2(contributions)))
    return {
        "BLOCK": block,
        "BINS": bins,
        "STEP": max(1, min(16, 8192 // bins)),
        "NUM_WARPS": max(4, block // (32 * THREAD_ELEMENTS)),
    }
