"""Plan which rows meet which expert: launches of the routing kernels, sized without looking.

T tokens, K experts per token, E local experts. Every buffer has its static upper bound, so that
nothing is read back to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from . import routing_kernels as kernels
from .launches import empty, launch
from .tiles import tile_bound

# Contributions that are placed by a single launch.
ONE_LAUNCH = 2048
# Contributions that a program looks at in one step: with one launch, and with two.
BLOCK = 2048
LEAST_BLOCK = 128
CHUNK_BLOCK = 1024
# With two launches every program of the second reads all counts: most of them, fewest chunks.
MOST_COUNTS = 32768
LEAST_CHUNKS = 64
LEAST_BINS = 128
# Elements of a step that one thread takes.
THREAD_ELEMENTS = 8
CHUNK_THREAD_ELEMENTS = 4


@dataclass(frozen=True)
class Plan:
    """Hold the expert order of T*K contributions.

    order: int32 [T*K], position -> contribution, as many as are live; which of an expert's comes
    first may differ from run to run. local: int32 [T*K], the expert of each contribution or -1.
    tiles: int32 [1 + tile_bound, 3], see routing_kernels. inverse: int32 [T*K], contribution ->
    position, where asked for. progress: int32 [2 + tile_bound] zeros, where asked for.
    """

    order: Tensor
    local: Tensor
    tiles: Tensor
    inverse: Tensor | None = None
    progress: Tensor | None = None

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
    is_progress_wanted: bool = False,
    options: Callable[[], dict[str, Any]] = dict,
) -> Plan:
    """Launch the routing of T*K > 0 contributions on the current device; one or two kernels.

    options: returns those of the next launch.
    """
    contributions, top_k = topk_ids.numel(), topk_ids.shape[1]
    bound = tile_bound(contributions, num_experts, block_m)
    buffer = functools.partial(empty, dtype=torch.int32, device=topk_ids.device)
    order, local, tiles = buffer((contributions,)), buffer((contributions,)), buffer((1 + bound, 3))
    inverse = buffer((contributions,)) if is_inverse_wanted else None
    progress = buffer((2 + bound,)) if is_progress_wanted else None

    map_size = 0 if expert_map is None else expert_map.numel()
    if expert_map is not None:
        expert_map = expert_map.contiguous()
    shape = (contributions, top_k, num_experts, map_size, *topk_ids.stride())
    read = {"HAS_MAP": expert_map is not None, "IS_FLAT": topk_ids.is_contiguous()}
    wanted = {"HAS_INVERSE": is_inverse_wanted, "HAS_PROGRESS": is_progress_wanted}
    placed = {"BLOCK_M": block_m, **wanted}
    if contributions <= ONE_LAUNCH:
        sizes = place_sizes(contributions, num_experts)
        launch(
            kernels.place_kernel,
            num_experts,
            order,
            local,
            tiles,
            inverse,
            progress,
            topk_ids,
            expert_map,
            *shape,
            **read,
            **placed,
            **sizes,
            **options(),
        )
        return Plan(order, local, tiles, inverse, progress)

    sizes = chunk_sizes(num_experts)
    chunks = min(most_chunks(num_experts), triton.cdiv(contributions, CHUNK_BLOCK))
    counts, ranks = buffer((chunks, sizes["BINS"])), buffer((contributions,))
    counted = (counts, ranks, local)
    given: dict[str, Any] = {**read, **sizes, **options()}
    launch(kernels.count_kernel, chunks, *counted, topk_ids, expert_map, *shape, **given)
    given = {**placed, **sizes, **options()}
    written = (order, tiles, inverse, progress)
    launch(kernels.scatter_kernel, chunks, *written, *counted, contributions, **given)
    return Plan(order, local, tiles, inverse, progress)


def place_sizes(contributions: int, num_experts: int) -> dict[str, int]:
    """Return sizes of the one launch: contributions of a step, counted experts, warps."""
    block = max(LEAST_BLOCK, min(BLOCK, triton.next_power_of_2(contributions)))
    return {
        "BLOCK": block,
        "BINS": count_bins(num_experts),
        "num_warps": max(4, block // (32 * THREAD_ELEMENTS)),
    }


def chunk_sizes(num_experts: int) -> dict[str, int]:
    """Return the same sizes of the two launches."""
    return {
        "BLOCK": CHUNK_BLOCK,
        "BINS": count_bins(num_experts),
        "num_warps": max(4, CHUNK_BLOCK // (32 * CHUNK_THREAD_ELEMENTS)),
    }


def most_chunks(num_experts: int) -> int:
    """Return the number of chunks beyond which they grow instead."""
    return max(LEAST_CHUNKS, MOST_COUNTS // count_bins(num_experts))


def count_bins(num_experts: int) -> int:
    """Return the columns of the table of counts."""
    return max(LEAST_BINS, int(triton.next_power_of_2(num_experts)))
