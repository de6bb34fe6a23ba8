"""Which sequence of kernels computes a layer, as plain data; host only, needs no GPU.

"apart": quantise, product, quantise, product, sum, by pointers, tiles from tiles.TABLE; everywhere.
"fused": the same, but a given scale quantises in the first product; as "apart" where that lets
launches overlap, else with loads by descriptor, asynchronous products, or both in one launch
(variant_tables.py).
"decode": no routing and no sum apart; for one token, and for few of small experts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

from .. import compat, compat_inductor
from ..oracle import DeviceFacts
from . import decode_tiles, tiles
from .tiles import Product, Tile
from .variant_tables import (
    DESCRIPTOR_K,
    FEW_ROWS,
    STREAM_PAIRS,
    fused_table,
    is_uneven,
    stream_table,
)

# Rows of tensor descriptors start at multiples of so many bytes, as do those of codes and floats
# that are read by words.
DESCRIPTOR_BYTES: Final = 16
# Columns that a program quantises or multiplies as one block.
SPREAD_COLUMNS: Final = 8192
WHOLE_ROW: Final = 16384
# More contributions than this leave "decode" behind: it reads an expert once for each.
DECODE_CONTRIBUTIONS: Final = 64
# Contributions are counted in 32 bits.
EVERY_SIZE: Final = (1 << 31) - 1
# Contributions up to which kernels start before those ahead have ended; Qwen3, 4096 tokens, loses
# 1 % by it. Lines of 128 bytes of each row of weights that a waiting product fetches into L2: 2
# gain 1 to 2 % of a layer at 64 to 1024 tokens, 4 half of that, 8 and more lose.
EARLY_CONTRIBUTIONS: Final = 8192
AHEAD_LINES: Final = 2
# The generation whose tables these are, what the products of loads "async" are made for, and the
# rows of a group of warps there: Hopper.
MEASURED_MAJOR: Final = 9
ASYNC_CAPABILITY: Final = (9, 0)
GROUP_ROWS: Final = 64
# Columns of a block of weights of loads "stream", and rows of a tile: those that tests run.
STREAM_COLUMNS: Final = 64
STREAM_ROWS: Final = frozenset(up.block_m for up, _ in STREAM_PAIRS)
# Loads whose kernels are Gluon's.
GLUON_LOADS: Final = {"async", "stream"}

CACHE_KEY: Final = "int8moe_compile.lowerings.variants"


@dataclass(frozen=True)
class Variant:
    """Name a sequence of kernels and its tiles."""

    name: str
    up: Tile
    down: Tile


@dataclass(frozen=True)
class Schedule:
    """Name a variant by contributions: (most contributions, variant), rising, none "apart".

    A graph whose number of tokens is a symbol holds all of them and launches one.
    """

    steps: tuple[tuple[int, Variant], ...]

    def __post_init__(self) -> None:
        """Refuse steps of which no graph can be made, or that leave sizes without a launch."""
        bounds = [most for most, _ in self.steps]
        is_rising = all(a < b for a, b in itertools.pairwise(bounds))
        if not is_rising or not bounds or bounds[-1] < EVERY_SIZE:
            raise ValueError(f"steps: wanted rising bounds up to {EVERY_SIZE}, got {bounds}")
        names = [variant.name for _, variant in self.steps]
        if "apart" in names or "fused" not in names:
            raise ValueError(f"steps: wanted decode and fused, at least one fused, got {names}")


@dataclass(frozen=True)
class Features:
    """Say what a call has that a variant may not take."""

    quant: str = "token"
    is_int8_input: bool = False
    is_weight_on_input: bool = False
    # Weights as one matrix [E*N, depth] of aligned rows, of which a host can make descriptors.
    has_plain_weights: bool = True


def label(variant: Variant) -> str:
    """Return a variant's name in tables: kernels, loads, tiles."""
    if variant.name == "apart":
        return "apart"
    up, down = variant.up, variant.down
    if variant.name == "decode":
        first, second = (f"{t.block_n}k{t.block_k}w{t.num_warps}" for t in (up, down))
        return f"decode {first}/{second}"
    loads = up.loads if up.loads == down.loads else f"{up.loads}/{down.loads}"
    return f"fused {loads} {up.block_m}x{tile_label(up)}/{tile_label(down)}"


def tile_label(tile: Tile) -> str:
    """Return columns, warps, stages and resident programs of a tile; f: flat, t: with a tail."""
    kind = ("f" if tile.is_flat else "") + ("t" if tile.has_tail else "")
    return f"{tile.block_n}w{tile.num_warps}s{tile.num_stages}p{tile.programs}{kind}"


def takes(variant: Variant, up: Product, down: Product, device: DeviceFacts, has: Features) -> bool:
    """Say whether a variant computes a call; "apart" computes all."""
    if variant.name == "apart":
        return True
    if variant.name == "decode":
        fits = up.depth <= SPREAD_COLUMNS and down.depth <= WHOLE_ROW
        is_even = up.depth % DESCRIPTOR_BYTES == 0 and down.depth % DESCRIPTOR_BYTES == 0
        is_plain = not has.is_int8_input and not has.is_weight_on_input and has.has_plain_weights
        return fits and is_even and is_plain and has.quant in ("token", "static", "none")
    loads = {variant.up.loads, variant.down.loads}
    if loads != {"pointers"}:
        major = (device.capability or (0, 0))[0]
        is_aligned = up.depth % DESCRIPTOR_BYTES == 0 and down.depth % DESCRIPTOR_BYTES == 0
        if tiles.is_rocm(device) or major < 9 or not is_aligned or not has.has_plain_weights:
            return False
    is_filled = _runs_ahead(variant.up, up.depth) and _runs_ahead(variant.down, down.depth)
    if loads & GLUON_LOADS and not (is_filled and _has_gluon(device)):
        return False
    if "stream" in loads and (up.panels == 1 or not _is_stream(variant)):
        return False
    if variant.up.is_ordered and (
        has.is_int8_input or has.is_weight_on_input or up.depth > SPREAD_COLUMNS
    ):
        return False
    return has.quant in ("token", "static") and down.depth <= WHOLE_ROW


def _is_measured(device: DeviceFacts) -> bool:
    """Say whether the tables hold for a device; otherwise "apart" is chosen."""
    return not tiles.is_rocm(device) and (device.capability or (0, 0))[0] == MEASURED_MAJOR


def _has_gluon(device: DeviceFacts) -> bool:
    """Say whether there are kernels of loads "async" and "stream"."""
    is_hopper = not tiles.is_rocm(device) and device.capability == ASYNC_CAPABILITY
    return is_hopper and compat_inductor.gluon_compiles()


def _is_stream(variant: Variant) -> bool:
    """Say whether tiles are such that the kernel of loads "stream" computes both products."""
    up, down = variant.up, variant.down
    is_one = replace(up, block_n=0, block_k=0) == replace(down, block_n=0, block_k=0)
    is_even = up.block_k >= DESCRIPTOR_K and up.block_k % DESCRIPTOR_K == 0
    panels = down.block_n // STREAM_COLUMNS
    is_shaped = up.block_n == STREAM_COLUMNS and down.block_n in (
        STREAM_COLUMNS,
        2 * STREAM_COLUMNS,
    )
    is_same_size = down.block_k * panels == 2 * up.block_k
    is_deep = up.num_stages >= 2 and up.num_warps == 4
    has_rows = up.block_m in STREAM_ROWS
    return is_one and is_even and is_shaped and is_same_size and is_deep and has_rows


def _runs_ahead(tile: Tile, depth: int) -> bool:
    """Say whether a tile is none of loads "async", or one that its kernels compute."""
    rows = tile.block_m // (2 if tile.has_tail else 1)
    is_filled = tiles.ceil_div(depth, tile.block_k) >= tile.num_stages - 1
    is_shaped = rows >= GROUP_ROWS and tile.block_k == DESCRIPTOR_K
    return tile.loads != "async" or (is_filled and is_shaped)


def measured(
    up: Product,
    down: Product,
    device: DeviceFacts,
    *,
    has_gluon: bool = True,
    is_early: bool = True,
) -> Variant | None:
    """Return what is faster than "apart" by the tables; None where nothing is.

    is_early: kernels may start before those ahead end, as far as the graph is concerned. Both
    products in one launch are measured so alone.
    """
    if not _is_measured(device) or min(up.depth, down.depth) < DESCRIPTOR_K:
        return None
    few = _measured_decode(up, down)
    return few or _measured_fused(up, down, device, has_gluon, is_early=is_early)


def _measured_fused(
    up: Product, down: Product, device: DeviceFacts, has_gluon: bool, *, is_early: bool = True
) -> Variant | None:
    """Return what is faster than "apart" by the tables of "fused"; None where nothing is."""
    rows = tiles.rows_per_expert(up.contributions, up.experts)
    if up.a_bytes != 1 or min(up.depth, down.depth) < DESCRIPTOR_K:
        return None
    has_gluon = has_gluon and _has_gluon(device)
    is_streamed = has_gluon and is_early and comes_early(up.contributions, device)
    for most, first, second in stream_table(up, down) if is_streamed else ():
        variant = Variant("fused", first, second)
        if rows <= most and fits(variant, up, down, device):
            return variant
    if rows <= FEW_ROWS and not is_uneven(up, down):
        # The same products; what is faster is that launches overlap.
        pair = tiles.choose_pair(up, down, device)
        return Variant("fused", *pair) if starts_early(up.contributions, device) else None
    table = fused_table(up, down, is_async=has_gluon)
    _, first, second = next(row for row in table if rows <= row[0])
    if up.panels == 1:
        # Measured with gate and up side by side.
        first = replace(first, block_n=min(256, 2 * first.block_n))
    variant = Variant("fused", first, second)
    if fits(variant, up, down, device):
        return variant
    return _measured_fused(up, down, device, has_gluon=False) if has_gluon else None


def fits(variant: Variant, up: Product, down: Product, device: DeviceFacts) -> bool:
    """Say whether the operands of both tiles find room in shared memory."""
    pairs = ((variant.up, up), (variant.down, down))
    return all(tiles.shared_memory(t, p, device) <= tiles.limit_of(device) for t, p in pairs)


def comes_early(contributions: int, device: DeviceFacts) -> bool:
    """Say whether the kernels of a call start before those ahead have ended, in_turn() aside."""
    return contributions <= EARLY_CONTRIBUTIONS and tiles.launches_early(device)


def starts_early(contributions: int, device: DeviceFacts) -> bool:
    """Say whether the kernels of a call start before those ahead have ended."""
    return comes_early(contributions, device) and not _in_turn


def lines_ahead(is_early: bool, contributions: Any = 1, experts: int = 0) -> int:
    """Return how many lines of each row of weights a product fetches while it waits.

    contributions, experts: of a product that knows no routing yet and hopes for every expert.
    """
    is_likely = isinstance(contributions, int) and contributions >= 2 * experts
    return AHEAD_LINES if is_early and is_likely else 0


def decode_variant(up: Product, down: Product) -> Variant | None:
    """Return the variant without routing for as few contributions as it may take."""
    if up.contributions > DECODE_CONTRIBUTIONS:
        return None
    return Variant("decode", *decode_tiles.choose_pair(up, down))


def _measured_decode(up: Product, down: Product) -> Variant | None:
    """Return "decode" where it was measured to be faster: it reads an expert for each row."""
    if up.a_bytes == 4 or up.contributions * up.depth == 0:
        return None
    is_spread = decode_tiles.has_small_experts(up, down) and 2 * up.contributions <= up.experts
    tokens = up.contributions // up.top_k
    return decode_variant(up, down) if tokens == 1 or (tokens <= 4 and is_spread) else None


_forced: list[Variant | Schedule] = []
_in_turn: list[bool] = []


@contextlib.contextmanager
def _overriding(stack: list[Any], item: Any) -> Iterator[None]:
    stack.append(item)
    compat.add_to_inductor_key(CACHE_KEY, repr((_forced, _in_turn)))
    try:
        yield
    finally:
        stack.pop()
        compat.add_to_inductor_key(CACHE_KEY, repr((_forced, _in_turn)))


def forced(variant: Variant | Schedule) -> AbstractContextManager[None]:
    """Compute layers with one variant, or by a schedule, where it takes the call.

    For tests and benchmarks; a graph keeps what it was compiled with, also in Inductor's cache.
    """
    return _overriding(_forced, variant)


def in_turn() -> AbstractContextManager[None]:
    """Start every kernel when those ahead have ended: a profiler counts waiting as its time."""
    return _overriding(_in_turn, True)


def asked_for(
    up: Product,
    down: Product,
    device: DeviceFacts,
    *,
    is_sized: bool = True,
    is_early: bool = True,
) -> Variant | None:
    """Return the variant that sizes ask for, the forced one or the tables'; None: "apart".

    is_sized: the number of tokens is known; otherwise a schedule may hold the tables' for all.
    is_early: kernels may start before those ahead end; else the products of "apart" gain nothing.
    """
    forced = forced_variant(up.contributions)
    if forced is not None or not is_sized:
        return forced
    found = measured(up, down, device, is_early=is_early)
    is_same = found is not None and (found.name, found.up.loads) == ("fused", "pointers")
    return None if is_same and not is_early else found


def plainer(
    variant: Variant | None, up: Product, down: Product, device: DeviceFacts
) -> Variant | None:
    """Return what the tables have for calls that their Gluon kernels do not take."""
    is_gluon = variant is not None and bool({variant.up.loads, variant.down.loads} & GLUON_LOADS)
    return measured(up, down, device, has_gluon=False) if is_gluon and not _forced else None


def choose(
    up: Product,
    down: Product,
    device: DeviceFacts,
    has: Features,
    *,
    is_sized: bool = True,
    is_early: bool = True,
) -> Variant:
    """Return the variant of a call: what asked_for returns if it takes the call, else "apart"."""
    asked = asked_for(up, down, device, is_sized=is_sized, is_early=is_early)
    for variant in (asked, plainer(asked, up, down, device)):
        if variant is not None and takes(variant, up, down, device, has):
            return variant
    return Variant("apart", *tiles.choose_pair(up, down, device))


def asked_schedule(
    up: Product, down: Product, device: DeviceFacts, *, is_early: bool = True
) -> Schedule | None:
    """Return the schedule that a call of any size asks for, the forced one or the tables'."""
    if not _forced:
        return _measured_schedule(up, down, device, has_gluon=True, is_early=is_early)
    return _forced[-1] if isinstance(_forced[-1], Schedule) else None


def schedule(
    up: Product, down: Product, device: DeviceFacts, has: Features, *, is_early: bool = True
) -> Schedule | None:
    """Return the schedule of a call of any size, if one is asked for and takes it throughout."""
    asked = asked_schedule(up, down, device, is_early=is_early)
    plain = None
    if not _forced:
        plain = _measured_schedule(up, down, device, has_gluon=False, is_early=is_early)
    for found in (asked, plain):
        if found is not None and all(takes(v, up, down, device, has) for _, v in found.steps):
            return found
    return None


def _measured_schedule(
    up: Product, down: Product, device: DeviceFacts, *, has_gluon: bool, is_early: bool
) -> Schedule | None:
    """Return a step for each row of the layer's table, the first for few rows an expert.

    No "decode": one token has a graph of its own, as Inductor makes 1 a constant.
    """
    if not _is_measured(device) or up.a_bytes != 1:
        return None
    table = fused_table(up, down, is_async=has_gluon and _has_gluon(device))
    rows = {FEW_ROWS // 2, FEW_ROWS, *(most for most, _, _ in (*stream_table(up, down), *table))}
    found = {most * up.experts for most in rows if most < float("inf")} | {EARLY_CONTRIBUTIONS}
    bounds = sorted(int(most) for most in found)
    steps: list[tuple[int, Variant]] = []
    for most in (*bounds, EVERY_SIZE):
        sized = replace(up, contributions=most), replace(down, contributions=most)
        variant = _measured_fused(*sized, device, has_gluon, is_early=is_early)
        if variant is None:
            variant = Variant("fused", *tiles.choose_pair(*sized, device))
        if steps and steps[-1][1] == variant:
            steps.pop()
        steps.append((most, variant))
    return Schedule(tuple(steps))


def forced_variant(contributions: int) -> Variant | None:
    """Return the variant that a test or benchmark asks for at a size."""
    asked = _forced[-1] if _forced else None
    if isinstance(asked, Schedule):
        return next((v for most, v in asked.steps if contributions <= most), None)
    return asked
