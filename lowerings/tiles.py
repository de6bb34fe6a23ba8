"""Which tile for which problem on which device, as plain data; host only, needs no GPU.

Letters as everywhere: T tokens, K experts per token, E local experts. All choices depend on sizes
and device facts alone, never on a device's name, so an unknown device is nothing to warn about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from ..oracle import DeviceFacts

# What one block may use where nobody knows: the least of all devices that have an int8 dot.
LEAST_SHARED_MEMORY: Final = 65536
# Least tile that tl.dot takes for 8-bit operands on every target.
LEAST_M: Final = 16
LEAST_N: Final = 32
LEAST_K: Final = 32
# From so many rows on, warp groups multiply asynchronously: Hopper and data centre Blackwell.
ASYNC_M: Final = 64
ASYNC_MAJORS: Final = (9, 10, 11)
# Shared memory of loads "stream" beside its buffers, for tiles of so many rows and for more.
STREAM_FEW_ROWS: Final = 32
STREAM_BYTES: Final = 10240
MORE_STREAM_BYTES: Final = 17408


@dataclass(frozen=True)
class Tile:
    """Shape one program of a grouped product, with the launch options that go with it.

    The last four are for the kernels of variants.py: loads "pointers", "weights" or "both" says
    what comes by tensor descriptor, "async" that both do and that products run on meanwhile,
    "stream" that both products are one launch; programs how many stay on a multiprocessor (0: one a
    tile), is_flat that a program's tiles are one loop, has_tail that a tile of few rows is halved.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    loads: str = "pointers"
    programs: int = 0
    is_flat: bool = False
    has_tail: bool = False

    @property
    def is_ordered(self) -> bool:
        """Say whether it takes activations that lie in expert order."""
        return self.loads in ("both", "async", "stream")


@dataclass(frozen=True)
class Product:
    """Describe one grouped product: contributions x depth times experts x (panels * width) x depth.

    panels: 2 where gate and up rows are multiplied side by side. a_bytes: bytes of an activation
    in the product, 1 for codes. top_k: contributions of a token.
    """

    contributions: int
    experts: int
    depth: int
    width: int
    panels: int = 1
    a_bytes: int = 1
    top_k: int = 1


# Rows an expert gets on average (at most) -> tile of the first (two panels) and second product.
# Swept on an H200 over the shapes of benchmarks/shapes.py (benchmarks/sweep_tiles.py).
TABLE: Final[tuple[tuple[float, Tile, Tile], ...]] = (
    (12, Tile(16, 64, 256, 4, 4), Tile(16, 64, 128, 4, 5)),
    (24, Tile(32, 64, 256, 4, 3), Tile(32, 128, 128, 4, 4)),
    (66, Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3)),
    (768, Tile(128, 128, 128, 8, 4, 8), Tile(128, 256, 128, 8, 4, 8)),
    (float("inf"), Tile(128, 64, 128, 4, 3, 8), Tile(128, 128, 128, 4, 3, 8)),
)
# Few experts fill the GPU with column blocks, not with M tiles: wide tiles from fewer rows on.
FEW_EXPERTS: Final = 16
FEW_EXPERTS_TABLE: Final[tuple[tuple[float, Tile, Tile], ...]] = (
    (12, Tile(16, 64, 256, 4, 4), Tile(16, 64, 256, 4, 5)),
    (24, Tile(32, 64, 256, 4, 3), Tile(32, 128, 128, 4, 4)),
    (48, Tile(64, 128, 128, 8, 4), Tile(64, 256, 128, 8, 4)),
    (2048, Tile(128, 128, 128, 8, 4, 8), Tile(128, 256, 128, 8, 4, 8)),
    (float("inf"), Tile(128, 64, 128, 4, 3, 8), Tile(128, 256, 128, 8, 3, 8)),
)
# Activations in floating point: fp16 and bf16 on the tensor cores, fp32 without them. Depth tiles
# of the tables above are cut for two bytes an activation. Few rows have tiles of their own, as an
# int8 row of 64 bytes is half a cache line (benchmarks/sweep_tiles.py --quant none, H200).
FLOAT_TABLE: Final[tuple[tuple[float, Tile, Tile], ...]] = (
    (12, Tile(16, 64, 256, 4, 3), Tile(16, 64, 128, 4, 4)),
    (24, Tile(32, 64, 256, 4, 3), Tile(32, 128, 128, 4, 4)),
)
FEW_EXPERTS_FLOAT_TABLE: Final = (
    (12, Tile(16, 64, 256, 4, 3), Tile(16, 64, 256, 4, 4)),
    *FLOAT_TABLE[1:],
)
FLOAT_K: Final = 64
FP32_TILE: Final = Tile(16, 32, 32, 4, 2)


def rows_per_expert(contributions: int, experts: int) -> float:
    """Return how many rows an expert gets on average when all of those that can are used."""
    return contributions / max(1, min(experts, contributions))


def ceil_div(size: int, part: int) -> int:
    """Return size / part, rounded up."""
    return -(-size // part)


def tile_bound(
    contributions: Any,
    experts: int,
    block_m: int,
    *,
    minimum: Callable[..., Any] = min,
    cdiv: Callable[..., Any] = ceil_div,
) -> Any:
    """Return the most tiles that any routing can need; sizes may be symbolic, with their own ops.

    sum(ceil(c / BM)) <= min(TK, ceil(TK / BM) + E), because only a non-empty expert pads.
    """
    return minimum(contributions, cdiv(contributions, block_m) + experts)


def shared_memory(tile: Tile, product: Product, device: DeviceFacts) -> int:
    """Return the bytes of shared memory that the pipelined operands of a tile take.

    One buffer fewer than stages, but for the asynchronous products of Hopper and later, which
    still read the last one (compiled offline with Triton 3.6 and 3.7: exact for sm_80 to sm_90).
    There weight-only codes lie a second time as floats, which is what is read, in one buffer.
    """
    a_bytes, w_bytes = tile.block_m * product.a_bytes, tile.block_n * product.panels
    if tile.loads == "async":
        # Every buffer, a barrier for each, and where a tile's values change hands for the store.
        barrier, exchange = 8, 1024 * tile.num_warps
        return tile.num_stages * ((a_bytes + w_bytes) * tile.block_k + barrier) + exchange
    if tile.loads == "stream":
        # Every buffer, barriers and notes, and where values change hands for the store (fp32).
        other = STREAM_BYTES if tile.block_m <= STREAM_FEW_ROWS else MORE_STREAM_BYTES
        return tile.num_stages * (a_bytes + w_bytes) * tile.block_k + other
    major = (device.capability or (0, 0))[0]
    # ROCm devices have a capability, too: gfx942 says (9, 4).
    is_asynchronous = major in ASYNC_MAJORS and not is_rocm(device) and tile.block_m >= ASYNC_M
    buffers = max(1, tile.num_stages - 1)
    if not is_asynchronous:
        return buffers * (a_bytes + w_bytes) * tile.block_k
    last = a_bytes + w_bytes * product.a_bytes
    return (buffers * (a_bytes + w_bytes) + last) * tile.block_k


def limit_of(device: DeviceFacts) -> int:
    """Return the most shared memory that one program may use."""
    return device.shared_memory or LEAST_SHARED_MEMORY


def is_rocm(device: DeviceFacts) -> bool:
    """Say whether facts are those of a ROCm device."""
    return device.arch is not None and device.arch.startswith("gfx")


def launches_early(device: DeviceFacts) -> bool:
    """Say whether a kernel can start before the one ahead of it has ended."""
    is_cuda = device.type == "cuda" and not is_rocm(device)
    return is_cuda and (device.capability or (0, 0))[0] >= 9


def packs_codes(device: DeviceFacts, a_bytes: int) -> bool:
    """Say whether codes become floats of so many bytes four at a time, see codes_to_float."""
    is_cuda = device.type == "cuda" and not is_rocm(device)
    return a_bytes == 2 and is_cuda and (device.capability or (0, 0)) >= (8, 0)


def fit(tile: Tile, product: Product, device: DeviceFacts) -> Tile:
    """Shrink a tile until it fits the problem and the device: stages, then K, then N, then M."""
    tile = replace(tile, block_k=fitting_k(tile.block_k, product.depth))
    if is_rocm(device):
        tile = replace(tile, num_stages=2)
    limit = limit_of(device)
    while shared_memory(tile, product, device) > limit:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 2 * LEAST_K:
            tile = replace(tile, block_k=tile.block_k // 2)
        elif tile.block_n > LEAST_N:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.block_m > LEAST_M:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            return replace(tile, block_k=LEAST_K)
    return tile


def fitting_k(block_k: int, depth: int) -> int:
    """Return the widest K tile up to block_k without a masked tail, or a masked one.

    2880 is 45 tiles of 64; masking every load of 22.5 tiles of 128 costs more.
    """
    block_k = min(block_k, max(LEAST_K, 1 << (depth - 1).bit_length()))
    smaller = block_k
    while smaller >= 2 * LEAST_K:
        if depth % smaller == 0:
            return smaller
        smaller //= 2
    return min(block_k, 2 * FLOAT_K)


def choose(product: Product, device: DeviceFacts, block_m: int | None = None) -> Tile:
    """Return the table's tile for a product; block_m, once chosen, holds for the whole layer."""
    rows = rows_per_expert(product.contributions, product.experts)
    if product.a_bytes == 4:
        tile = FP32_TILE
    else:
        is_few = product.experts <= FEW_EXPERTS
        table = FEW_EXPERTS_TABLE if is_few else TABLE
        if product.a_bytes == 2:
            table = (FEW_EXPERTS_FLOAT_TABLE if is_few else FLOAT_TABLE) + table
        _, first, second = next(row for row in table if rows <= row[0])
        tile = first if product.panels == 2 else second
        if product.a_bytes == 2 and tile.block_m > FLOAT_TABLE[-1][1].block_m:
            tile = replace(tile, block_k=min(tile.block_k, FLOAT_K))
    if block_m is not None:
        tile = replace(tile, block_m=block_m)
    return fit(tile, product, device)


def choose_pair(up: Product, down: Product, device: DeviceFacts) -> tuple[Tile, Tile]:
    """Return tiles of both products; they share block_m, because they share the tile list."""
    first = choose(up, device)
    second = choose(down, device, first.block_m)
    if second.block_m != first.block_m:
        first = choose(up, device, second.block_m)
    return first, second


def candidates(product: Product, device: DeviceFacts, block_m: int) -> tuple[Tile, ...]:
    """Return what max-autotune compares, the table's own tile first."""
    chosen = choose(product, device, block_m)
    if product.a_bytes == 4:
        return (chosen,)
    found = [chosen]
    for tile in _variations(chosen, product):
        fitted = fit(tile, product, device)
        if fitted not in found and fitted.block_m == block_m:
            found.append(fitted)
    return tuple(found)


def _variations(tile: Tile, product: Product) -> Iterator[Tile]:
    """Yield tiles around the table's: other widths, depths, warps and stages."""
    for block_n, warps in ((32, 4), (64, 4), (128, 4), (128, 8), (256, 8)):
        accumulators = tile.block_m * block_n * product.panels
        if accumulators > 32768 or accumulators < 32 * 32 * warps // 4:
            continue
        is_deep = product.a_bytes == 1 or tile.block_m <= FLOAT_TABLE[-1][1].block_m
        for block_k in (128, 256) if is_deep else (64,):
            for stages in (3, 4):
                yield replace(
                    tile, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages
                )


@dataclass(frozen=True)
class RowBlock:
    """Shape one program of a row-wise kernel: rows, columns a step, warps."""

    rows: int
    columns: int
    num_warps: int


# Elements of a row-wise program and its columns at most, so that a thread holds 16 to 32 of them.
ROW_ELEMENTS: Final = 4096
ROW_COLUMNS: Final = 8192


def row_block(rows: int, columns: int) -> RowBlock:
    """Return the block of the quantising kernels: several short rows, or one row in steps."""
    width = min(ROW_COLUMNS, max(32, 1 << (columns - 1).bit_length()))
    height = max(1, ROW_ELEMENTS // width)
    # Few rows are spread over as many programs.
    while height > 1 and rows < 512 * height:
        height //= 2
    return RowBlock(height, width, max(1, min(8, width * height // 512)))


def whole_row(depth: int) -> int:
    """Return the block that holds a row."""
    return max(32, 1 << (depth - 1).bit_length())


def whole_slots(top_k: int) -> int:
    """Return the block that holds a token's slots."""
    return 1 << (top_k - 1).bit_length()
