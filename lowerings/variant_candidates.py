"""The variants that a benchmark compares for a layer; host only, needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..oracle import DeviceFacts
from . import tiles, variant_tables, variants
from .tiles import Product, Tile
from .variants import Features, Variant


def candidates(
    up: Product, down: Product, device: DeviceFacts, has: Features
) -> tuple[Variant, ...]:
    """Return the variants to compare for a layer: "apart", then what the tables name, if else."""
    default = Variant("apart", *tiles.choose_pair(up, down, device))
    found = [default]
    by_tables = (variants.measured(up, down, device, has_gluon=word) for word in (True, False))
    for variant in (*by_tables, variants.decode_variant(up, down), *_fused(up, down, default)):
        if variant is None or variant in found:
            continue
        if not variants.takes(variant, up, down, device, has):
            continue
        if variant.name == "decode" or variants.fits(variant, up, down, device):
            found.append(variant)
    return tuple(found)


def _fused(up: Product, down: Product, default: Variant) -> Iterator[Variant]:
    """Yield the products of "apart", both in one launch for few rows, and loads by descriptor."""
    yield Variant("fused", default.up, default.down)
    rows = tiles.rows_per_expert(up.contributions, up.experts)
    group = 32 if up.experts <= tiles.FEW_EXPERTS else 8
    if rows <= variant_tables.STREAM[-1][0]:
        for stream in variant_tables.STREAM_PAIRS:
            yield Variant("fused", *stream)
    if rows < 24:
        block_m = default.up.block_m
        for up_n, down_n in ((64, 64), (64, 128), (128, 128)):
            yield Variant(
                "fused",
                Tile(block_m, up_n, 128, 4, 4, 1, "weights"),
                Tile(block_m, down_n, 128, 4, 6 if down_n == 64 else 4, 1, "both"),
            )
        return
    for block_m in (64, 128):
        if block_m == 64 and rows > 192:
            continue
        first = Tile(block_m, 64, 128, 4, 3, group, "both", 2)
        second = Tile(block_m, 128, 128, 4, 3, group, "both", 2)
        wide = Tile(block_m, 256, 128, 8, 3, group, "both", 1)
        for width in (second, wide):
            yield Variant("fused", first, width)
            yield Variant("fused", replace(first, loads="weights"), width)
        if block_m == 128:
            tail = replace(first, has_tail=True)
            yield Variant("fused", tail, replace(second, has_tail=True))
            yield Variant("fused", replace(tail, loads="weights"), replace(second, has_tail=True))
            large = Tile(block_m, 128, 128, 8, 4, group, "both", 1)
            yield Variant("fused", large, replace(wide, num_stages=4))
            for pair in variant_tables.ASYNC_PAIRS:
                yield Variant("fused", *pair)
