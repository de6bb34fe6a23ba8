"""Bring contributions into expert order on the GPU: count, prefix, scatter, tile list.

T tokens, K experts per token, E local experts, P chunks. A contribution is (token, slot), numbered
token * K + slot. No host synchronisation.

    order = argsort(expert of live contributions)
    tiles = [(expert, first position, end position)] of BLOCK_M positions each, row 0 apart:
            (number of tiles, live contributions, 0)

Few contributions take one launch: place_kernel has one program per expert, which counts all of
them and finds its own, in the order of their numbers. Many take two, with one program per chunk:
count_kernel counts a chunk's contributions by atomics, each of which returns a rank within chunk
and expert, scatter_kernel adds up the table of counts. The order within an expert is then that of
the atomics; no result depends on it, since every row is computed and stored by itself.

Measured on an H200 and lost: ranks by comparing all pairs in a chunk (40 us for 512 contributions,
870 us for 131,072); a program per chunk and expert that searches the chunk for its own (57 us for
131,072).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent_launch import let_next_start, wait_for_earlier

# Tiles of one expert that are written in one step.
TILE_STEP = tl.constexpr(32)
# Counts that are read in one step.
COUNTS_STEP = tl.constexpr(8192)


@triton.jit
def id_offset(contribution, top_k, stride_it, stride_ik, IS_FLAT: tl.constexpr):
    """Return where the expert id of each contribution is."""
    if IS_FLAT:
        offset = contribution
    else:
        token = (contribution // top_k).to(tl.int64)
        slot = (contribution % top_k).to(tl.int64)
        offset = token * stride_it + slot * stride_ik
    return offset


@triton.jit
def is_within(expert, size):
    """Say which ids can be an index, in their own width: a large int64 must not wrap into range."""
    return (expert >= 0) & (expert < size)


@triton.jit
def live_expert(expert, num_experts):
    """Return the int32 local expert, -1 where there is none."""
    return tl.where(is_within(expert, num_experts), expert, -1).to(tl.int32)


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
    IS_FLAT: tl.constexpr,  # ids are contiguous: no division by K
) -> tl.tensor:
    """Return the int32 local expert of each contribution, -1 where there is none.

    Not for kernels whose stores go where the expert says: to Inductor, a pointer that depends on
    the result of a function depends on all of its arguments, so that ids and map would count as
    written, which a CUDA graph refuses of its inputs. Those kernels spell this out.
    """
    offset = id_offset(contribution, top_k, stride_it, stride_ik, IS_FLAT)
    expert = tl.load(ids_ptr + offset, mask=is_real, other=-1)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=is_within(expert, map_size), other=-1)
    return live_expert(expert, num_experts)


@triton.jit
def place_kernel(
    order_ptr,  # [T*K] int32, the first live ones written
    local_ptr,  # [T*K] int32: expert or -1
    tiles_ptr,  # [1 + tile bound, 3] int32
    inverse_ptr,  # HAS_INVERSE: [T*K] int32, contribution -> position
    progress_ptr,  # HAS_PROGRESS: [2 + tile bound] int32, zeros for who works on the tiles
    ids_ptr,
    map_ptr,
    num_contributions,
    top_k,
    num_experts,
    map_size,
    stride_it,
    stride_ik,
    HAS_MAP: tl.constexpr,
    IS_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    HAS_PROGRESS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Write the positions of one expert's contributions, and its tiles.

    position = first position of the expert + rank among its contributions.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_contributions, BLOCK):
        contribution = start + tl.arange(0, BLOCK)
        is_real = contribution < num_contributions
        offset = id_offset(contribution, top_k, stride_it, stride_ik, IS_FLAT)
        found = tl.load(ids_ptr + offset, mask=is_real, other=-1)
        if HAS_MAP:
            found = tl.load(map_ptr + found, mask=is_within(found, map_size), other=-1)
        found = live_expert(found, num_experts)
        tl.store(local_ptr + contribution, found, mask=is_real & (expert == 0))
        total += tl.histogram(tl.maximum(found, 0), BINS, mask=found >= 0)
    count = tl.sum(tl.where(bins == expert, total, 0), axis=0)
    first = tl.sum(tl.where(bins < expert, total, 0), axis=0)
    position = first

    if count > 0:
        for start in range(0, num_contributions, BLOCK):
            contribution = start + tl.arange(0, BLOCK)
            is_real = contribution < num_contributions
            offset = id_offset(contribution, top_k, stride_it, stride_ik, IS_FLAT)
            found = tl.load(ids_ptr + offset, mask=is_real, other=-1)
            if HAS_MAP:
                found = tl.load(map_ptr + found, mask=is_within(found, map_size), other=-1)
            found = live_expert(found, num_experts)
            is_mine = found == expert
            rank = tl.cumsum(is_mine.to(tl.int32), axis=0)
            tl.store(order_ptr + position + rank - 1, contribution, mask=is_mine)
            if HAS_INVERSE:
                tl.store(inverse_ptr + contribution, position + rank - 1, mask=is_mine)
            position += tl.sum(is_mine.to(tl.int32), axis=0)

    tiles = (total + BLOCK_M - 1) // BLOCK_M
    row = 1 + tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    for start in range(0, count, TILE_STEP * BLOCK_M):
        offset = start + tl.arange(0, TILE_STEP) * BLOCK_M
        tile_ptrs = tiles_ptr + 3 * (row + offset // BLOCK_M)
        is_tile = offset < count
        tl.store(tile_ptrs, expert, mask=is_tile)
        tl.store(tile_ptrs + 1, first + offset, mask=is_tile)
        tl.store(tile_ptrs + 2, first + tl.minimum(offset + BLOCK_M, count), mask=is_tile)
        if HAS_PROGRESS:
            tl.store(progress_ptr + 1 + row + offset // BLOCK_M, 0, mask=is_tile)
    if expert == 0:
        tl.store(tiles_ptr, tl.sum(tiles, axis=0))
        tl.store(tiles_ptr + 1, tl.sum(total, axis=0))
        tl.store(tiles_ptr + 2, 0)
        if HAS_PROGRESS:
            tl.store(progress_ptr, 0)
            tl.store(progress_ptr + 1, 0)


@triton.jit
def count_kernel(
    counts_ptr,  # [P, BINS] int32
    ranks_ptr,  # [T*K] int32: place among those of the same chunk and expert, 0 for none
    local_ptr,  # [T*K] int32: expert or -1
    ids_ptr,
    map_ptr,
    num_contributions,
    top_k,
    num_experts,
    map_size,
    stride_it,
    stride_ik,
    HAS_MAP: tl.constexpr,
    IS_FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Write local expert and rank of every contribution of one chunk, and each expert's count.

    Chunk p of P consists of the blocks p, p + P, ... of BLOCK contributions.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    chunk = tl.program_id(0)
    row_ptr = counts_ptr + chunk.to(tl.int64) * BINS
    tl.store(row_ptr + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    # A thread must not count before the others' zeros are there.
    tl.debug_barrier()
    for start in range(chunk * BLOCK, num_contributions, tl.num_programs(0) * BLOCK):
        contribution = start + tl.arange(0, BLOCK)
        is_real = contribution < num_contributions
        offset = id_offset(contribution, top_k, stride_it, stride_ik, IS_FLAT)
        expert = tl.load(ids_ptr + offset, mask=is_real, other=-1)
        if HAS_MAP:
            expert = tl.load(map_ptr + expert, mask=is_within(expert, map_size), other=-1)
        expert = live_expert(expert, num_experts)
        tl.store(local_ptr + contribution, expert, mask=is_real)
        is_live = expert >= 0
        # No other program meets this row, so nothing has to be ordered beyond this one.
        rank = tl.atomic_add(
            row_ptr + tl.maximum(expert, 0), 1, mask=is_live, sem="relaxed", scope="cta"
        )
        tl.store(ranks_ptr + contribution, tl.where(is_live, rank, 0), mask=is_real)


@triton.jit
def sum_chunks(counts_ptr, chunk, num_chunks, BINS: tl.constexpr):
    """Return the counts of every expert in all chunks, and in those before one chunk."""
    STEP: tl.constexpr = COUNTS_STEP // BINS if BINS < COUNTS_STEP else 1
    bins = tl.arange(0, BINS)
    total = tl.zeros((STEP, BINS), tl.int32)
    before = tl.zeros((STEP, BINS), tl.int32)
    for start in range(0, num_chunks, STEP):
        other = start + tl.arange(0, STEP)
        row_ptrs = counts_ptr + other.to(tl.int64)[:, None] * BINS + bins[None, :]
        counts = tl.load(row_ptrs, mask=(other < num_chunks)[:, None], other=0)
        total += counts
        before += tl.where((other < chunk)[:, None], counts, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit
def scatter_kernel(
    order_ptr,  # [T*K] int32, the first live ones written
    tiles_ptr,  # [1 + tile bound, 3] int32
    inverse_ptr,  # HAS_INVERSE: [T*K] int32, contribution -> position
    progress_ptr,  # HAS_PROGRESS: [2 + tile bound] int32, zeros for who works on the tiles
    counts_ptr,  # [P, BINS] int32, with the next two from count_kernel
    ranks_ptr,
    local_ptr,
    num_contributions,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    HAS_PROGRESS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Write the positions of one chunk's contributions, and a share of the tiles.

    position = first position of the expert + those of it in earlier chunks + rank in the chunk.
    """
    let_next_start(PDL)
    wait_for_earlier(PDL)
    chunk, num_chunks = tl.program_id(0), tl.num_programs(0)
    contribution = chunk * BLOCK + tl.arange(0, BLOCK)
    # Loads that need not wait for the table go before it, and before the stores of a turn.
    expert = tl.load(local_ptr + contribution, mask=contribution < num_contributions, other=-1)
    rank = tl.load(ranks_ptr + contribution, mask=contribution < num_contributions, other=0)
    total, before = sum_chunks(counts_ptr, chunk, num_chunks, BINS)
    first = tl.cumsum(total, axis=0) - total
    base = first + before
    for _ in range(chunk * BLOCK, num_contributions, num_chunks * BLOCK):
        is_live = expert >= 0
        position = tl.gather(base, tl.maximum(expert, 0), 0) + rank
        written = contribution
        contribution += num_chunks * BLOCK
        is_next = contribution < num_contributions
        expert = tl.load(local_ptr + contribution, mask=is_next, other=-1)
        rank = tl.load(ranks_ptr + contribution, mask=is_next, other=0)
        tl.store(order_ptr + position, written, mask=is_live)
        if HAS_INVERSE:
            tl.store(inverse_ptr + written, position, mask=is_live)

    # Program p writes the tiles p, p + P, ... of every expert.
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    row = 1 + tl.cumsum(tiles, axis=0) - tiles
    tile_ptrs = tiles_ptr + 3 * row
    for number in range(chunk, tl.max(tiles, axis=0), num_chunks):
        is_tile = number < tiles
        offset = number * BLOCK_M
        tl.store(tile_ptrs + 3 * number, tl.arange(0, BINS), mask=is_tile)
        tl.store(tile_ptrs + 3 * number + 1, first + offset, mask=is_tile)
        end = first + tl.minimum(offset + BLOCK_M, total)
        tl.store(tile_ptrs + 3 * number + 2, end, mask=is_tile)
        if HAS_PROGRESS:
            tl.store(progress_ptr + 1 + row + number, 0, mask=is_tile)
    if chunk == 0:
        tl.store(tiles_ptr, tl.sum(tiles, axis=0))
        tl.store(tiles_ptr + 1, tl.sum(total, axis=0))
        tl.store(tiles_ptr + 2, 0)
        if HAS_PROGRESS:
            tl.store(progress_ptr, 0)
            tl.store(progress_ptr + 1, 0)
