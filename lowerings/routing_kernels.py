"""Bring contributions into expert order on the GPU: count, prefix, scatter, tile list.

T tokens, K experts per token, E local experts, P chunks. A contribution is (token, slot), numbered
token * K + slot. No host synchronisation, no atomics: the order is that of the contribution
numbers within each expert, in every run.

    order = argsort(expert of live contributions, stable=True)
    tiles = [(expert, first position, end position)] of BLOCK_M positions each, row 0 apart:
            (number of tiles, live contributions, 0)
"""

from __future__ import annotations

import triton
import triton.language as tl

# Contributions compared with a whole chunk at a time: [CHUNK, LANES] comparisons a step.
LANES = tl.constexpr(64)


@triton.jit
def local_expert(
    ids_ptr,
    map_ptr,
    contribution: tl.tensor,
    is_real: tl.tensor,
    top_k,
    num_experts,
    map_size,
    stride_it,
    stride_ik,
    HAS_MAP: tl.constexpr,
) -> tl.tensor:
    """Return the int32 local expert of each contribution, -1 where there is none.

    Compared in the ids' own width, so that a large int64 id cannot wrap into range; an id or a
    mapped value outside its range is never used as an index.
    """
    token = (contribution // top_k).to(tl.int64)
    slot = (contribution % top_k).to(tl.int64)
    expert = tl.load(ids_ptr + token * stride_it + slot * stride_ik, mask=is_real, other=-1)
    if HAS_MAP:
        is_known = (expert >= 0) & (expert < map_size)
        expert = tl.load(map_ptr + tl.where(is_known, expert, 0), mask=is_known, other=-1)
    is_live = (expert >= 0) & (expert < num_experts) & is_real
    return tl.where(is_live, expert, -1).to(tl.int32)


@triton.jit
def count_kernel(
    counts_ptr,  # [P, BINS] int32
    ids_ptr,
    map_ptr,
    num_contributions,
    top_k,
    num_experts,
    map_size,
    stride_it,
    stride_ik,
    HAS_MAP: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Count the contributions of each expert in one chunk."""
    chunk = tl.program_id(0)
    contribution = chunk * CHUNK + tl.arange(0, CHUNK)
    is_real = contribution < num_contributions
    expert = local_expert(
        ids_ptr,
        map_ptr,
        contribution,
        is_real,
        top_k,
        num_experts,
        map_size,
        stride_it,
        stride_ik,
        HAS_MAP,
    )
    counts = tl.histogram(tl.maximum(expert, 0), BINS, mask=expert >= 0)
    tl.store(counts_ptr + chunk.to(tl.int64) * BINS + tl.arange(0, BINS), counts)


@triton.jit
def sum_chunks(counts_ptr, chunk, num_chunks, BINS: tl.constexpr, STEP: tl.constexpr):
    """Return the counts of every expert in all chunks, and in those before one chunk."""
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_chunks, STEP):
        other = start + tl.arange(0, STEP)
        row = counts_ptr + other.to(tl.int64)[:, None] * BINS + bins[None, :]
        counts = tl.load(row, mask=(other < num_chunks)[:, None], other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), axis=0)
    return total, before


@triton.jit
def place_kernel(
    order_ptr,  # [T*K] int32, the first live ones written
    local_ptr,  # [T*K] int32: expert or -1
    tiles_ptr,  # [1 + tile bound, 3] int32
    base_ptr,  # [P, BINS] int32 scratch
    counts_ptr,  # [P, BINS] int32; unused with one chunk
    ids_ptr,
    map_ptr,
    num_contributions,
    num_chunks,
    top_k,
    num_experts,
    map_size,
    stride_it,
    stride_ik,
    HAS_MAP: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write the positions of one chunk's contributions and a share of the tile list.

    position = first position of the expert + those of it in earlier chunks + rank in the chunk.
    """
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    contribution = chunk * CHUNK + lane
    is_real = contribution < num_contributions
    expert = local_expert(
        ids_ptr,
        map_ptr,
        contribution,
        is_real,
        top_k,
        num_experts,
        map_size,
        stride_it,
        stride_ik,
        HAS_MAP,
    )
    is_live = expert >= 0
    tl.store(local_ptr + contribution, expert, mask=is_real)

    bins = tl.arange(0, BINS)
    if ONE_CHUNK:
        total = tl.histogram(tl.maximum(expert, 0), BINS, mask=is_live)
        before = tl.zeros((BINS,), tl.int32)
    else:
        total, before = sum_chunks(counts_ptr, chunk, num_chunks, BINS, STEP)
    end = tl.cumsum(total, axis=0)
    first = end - total
    # Through memory, because a vector in registers cannot be indexed; each program has its row.
    base_row = base_ptr + chunk.to(tl.int64) * BINS
    tl.store(base_row + bins, first + before)
    tl.debug_barrier()

    rank = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, tl.minimum(num_contributions - chunk * CHUNK, CHUNK), LANES):
        earlier = start + tl.arange(0, LANES)
        number = chunk * CHUNK + earlier
        rival = tl.load(local_ptr + number, mask=number < num_contributions, other=-1)
        is_before = (rival[None, :] == expert[:, None]) & (earlier[None, :] < lane[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    position = tl.load(base_row + tl.maximum(expert, 0), mask=is_live, other=0) + rank
    tl.store(order_ptr + position, contribution, mask=is_live)

    tiles = tl.cdiv(total, BLOCK_M)
    tiles_end = tl.cumsum(tiles, axis=0)
    tile_row = tiles_ptr + 3 * (1 + tiles_end - tiles)
    for step in range(chunk, tl.max(tiles, axis=0), num_chunks):
        has_tile = step < tiles
        tile_first = first + step * BLOCK_M
        tile_end = tl.minimum(tile_first + BLOCK_M, end)
        tl.store(tile_row + 3 * step, bins, mask=has_tile)
        tl.store(tile_row + 3 * step + 1, tile_first, mask=has_tile)
        tl.store(tile_row + 3 * step + 2, tile_end, mask=has_tile)
    if chunk == 0:
        tl.store(tiles_ptr, tl.sum(tiles, axis=0))
        tl.store(tiles_ptr + 1, tl.sum(total, axis=0))
        tl.store(tiles_ptr + 2, 0)
