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

# Up to so many contributions one program counts and places all of them in a single launch.
ONE_CHUNK = 512
CHUNK = 256
# Beyond, larger chunks keep the [P, BINS] table of counts small: every program reads all of it.
LARGE = 16384
LARGE_CHUNK = 512
LEAST_BINS = 128


@dataclass(frozen=True)
class Plan:
    """Hold the expert order of T*K contributions.

    order: int32 [T*K], position -> contribution, as many as are live. local: int32 [T*K], the
    expert of each contribution or -1. tiles: int32 [1 + tile_bound, 3], see routing_kernels.
    """

    order: Tensor
    local: Tensor
    tiles: Tensor

    @property
    def contributions(self) -> int:
        """Return T*K."""
        return self.local.shape[0]

    @property
    def tile_bound(self) -> int:
        """Return the most tiles that any routing of this size can need."""
        return self.tiles.shape[0] - 1


def plan(topk_ids: Tensor, expert_map: Tensor | None, *, num_experts: int, block_m: int) -> Plan:
    """Launch the routing of T*K > 0 contributions on the current device; one or two kernels."""
    contributions, top_k = topk_ids.numel(), topk_ids.shape[1]
    device = topk_ids.device
    order = torch.empty(contributions, dtype=torch.int32, device=device)
    local = torch.empty(contributions, dtype=torch.int32, device=device)
    bound = tile_bound(contributions, num_experts, block_m)
    tiles = torch.empty((1 + bound, 3), dtype=torch.int32, device=device)

    chunk = chunk_of(contributions)
    chunks = triton.cdiv(contributions, chunk)
    table = launch_sizes(num_experts)
    bins = table["BINS"]
    base = torch.empty((2, chunks, bins), dtype=torch.int32, device=device)
    map_size = 0 if expert_map is None else expert_map.numel()
    if expert_map is not None:
        expert_map = expert_map.contiguous()
    source = (topk_ids, expert_map, contributions)
    sizes = (top_k, num_experts, map_size, *topk_ids.stride())
    has_map = expert_map is not None
    if chunks > 1:
        kernels.count_kernel[(chunks,)](base[1], *source, *sizes, has_map, chunk, bins)
    kernels.place_kernel[(chunks,)](
        order,
        local,
        tiles,
        base[0],
        base[1],
        *source,
        chunks,
        *sizes,
        HAS_MAP=has_map,
        ONE_CHUNK=chunks == 1,
        CHUNK=chunk,
        BINS=bins,
        STEP=table["STEP"],
        BLOCK_M=block_m,
        num_warps=8,
    )
    return Plan(order, local, tiles)


def chunk_of(contributions: int) -> int:
    """Return how many contributions one program places."""
    if contributions <= ONE_CHUNK:
        return max(CHUNK, triton.next_power_of_2(contributions))
    return CHUNK if contributions <= LARGE else LARGE_CHUNK


def launch_sizes(num_experts: int) -> dict[str, int]:
    """Return the columns of the table of counts, and how many of its rows are read at a time."""
    bins = max(LEAST_BINS, triton.next_power_of_2(num_experts))
    return {"BINS": bins, "STEP": max(1, min(16, 8192 // bins))}
