"""Tiles fit their device and cover their problem, from made-up device facts."""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import fields
from pathlib import Path

import pytest

from int8moe_compile.lowerings import tiles
from int8moe_compile.oracle import DeviceFacts

LIMITS = {"sm_75": 65536, "sm_86": 101376, "sm_80": 166912, "sm_90": 232448, "gfx942": 65536}
SIZES = (
    (128, 8, 2048, 768),
    (60, 4, 2048, 1408),
    (8, 2, 4096, 14336),
    (256, 8, 7168, 2048),
    (32, 4, 2880, 2880),
    (4, 2, 33, 17),
    (1024, 1, 16, 704),
)
TOKENS = (1, 2, 16, 64, 256, 1024, 4096, 8192)


def facts(arch: str) -> DeviceFacts:
    digits = arch.removeprefix("sm_").removeprefix("gfx")
    number = digits[:2] if arch.startswith("gfx") else digits
    capability = (int(number[:-1]), int(number[-1]))
    return DeviceFacts("cuda", capability, arch, LIMITS[arch], 100)


def products(a_bytes: int) -> list[tuple[tiles.Product, tiles.Product]]:
    return [
        (
            tiles.Product(tokens * K, E, H, width, 2, a_bytes, K),
            tiles.Product(tokens * K, E, width, H, 1, a_bytes, K),
        )
        for (E, K, H, width), tokens in itertools.product(SIZES, TOKENS)
    ]


@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("a_bytes", [1, 2, 4])
def test_every_tile_fits_its_device(arch: str, a_bytes: int) -> None:
    device = facts(arch)
    for pair in products(a_bytes):
        chosen = tiles.choose_pair(*pair, device)
        assert chosen[0].block_m == chosen[1].block_m
        for tile, product in zip(chosen, pair, strict=True):
            candidates = tiles.candidates(product, device, tile.block_m)
            assert candidates[0] == tile
            assert len(set(candidates)) == len(candidates)
            for each in candidates:
                assert tiles.shared_memory(each, product, device) <= LIMITS[arch]
                assert each.block_m == tile.block_m >= tiles.LEAST_M
                assert each.block_n >= tiles.LEAST_N and each.block_k >= tiles.LEAST_K
                for size in (each.block_m, each.block_n, each.block_k):
                    assert size & (size - 1) == 0


def test_a_tile_too_large_for_a_consumer_card_shrinks() -> None:
    tile = tiles.Tile(128, 256, 128, 8, 4)
    product = tiles.Product(65536, 8, 4096, 4096)
    card, server = facts("sm_86"), facts("sm_80")
    assert tiles.shared_memory(tile, product, card) == 147_456
    assert tiles.fit(tile, product, server) == tile
    fitted = tiles.fit(tile, product, card)
    assert fitted != tile
    assert tiles.shared_memory(fitted, product, card) <= 101_376


def test_hopper_counts_the_buffer_that_is_still_read() -> None:
    product = tiles.Product(65536, 8, 4096, 4096)
    wide, flat = tiles.Tile(128, 256, 128, 8, 3), tiles.Tile(16, 64, 256, 4, 4)
    assert tiles.shared_memory(wide, product, facts("sm_90")) == 3 * 384 * 128
    assert tiles.shared_memory(flat, product, facts("sm_90")) == 3 * 80 * 256


def test_rows_follow_the_tokens_of_an_expert() -> None:
    device = facts("sm_90")
    rows = [
        tiles.choose(tiles.Product(8 * tokens, 128, 2048, 768, 2), device).block_m
        for tokens in TOKENS
    ]
    assert rows == sorted(rows)
    assert rows[0] == 16 and rows[-1] == 128


def test_few_rows_of_floats_are_as_deep_as_a_cache_line() -> None:
    device = facts("sm_90")
    for (E, K, H, width), tokens in itertools.product(SIZES[:4], (1, 16, 64)):
        up = tiles.Product(tokens * K, E, H, width, 2, 2)
        pair = tiles.choose_pair(up, tiles.Product(tokens * K, E, width, H, 1, 2), device)
        for tile in pair:
            assert tile.block_m <= 32 and tile.block_k >= 128
        assert {tile.block_k for tile in tiles.candidates(up, device, pair[0].block_m)} == {
            128,
            256,
        }
    many = tiles.Product(8 * 4096, 128, 2048, 768, 2, 2)
    assert tiles.choose(many, device).block_k == 64


def test_depths_without_a_masked_tail() -> None:
    for depth in (2880, 2816, 1408, 704, 768, 7168):
        block_k = tiles.fitting_k(256, depth)
        assert depth % block_k == 0 and block_k >= 64
    assert tiles.fitting_k(256, 33) == 64
    assert tiles.fitting_k(256, 16) == 32


def test_the_bound_holds_for_every_routing() -> None:
    draw = random.Random(0)
    for _ in range(300):
        experts, block_m = draw.choice([1, 3, 60, 128, 1024]), draw.choice([16, 32, 64, 128])
        counts = [0] * experts
        for _ in range(draw.choice([1, 2, 17, 500, 3000])):
            counts[draw.randrange(experts)] += 1
        needed = sum(tiles.ceil_div(count, block_m) for count in counts)
        assert needed <= tiles.tile_bound(sum(counts), experts, block_m)


def test_row_blocks_cover_a_row_with_a_power_of_two() -> None:
    for rows, columns in itertools.product((1, 8, 4096, 131072), (16, 33, 768, 2880, 14336)):
        block = tiles.row_block(rows, columns)
        assert block.columns & (block.columns - 1) == 0
        assert block.columns >= min(columns, tiles.ROW_COLUMNS)
        assert block.rows * block.columns <= max(tiles.ROW_ELEMENTS, block.columns)
        assert 1 <= block.num_warps <= 8


def test_an_unknown_device_is_nothing_to_warn_about(caplog: pytest.LogCaptureFixture) -> None:
    unknown = DeviceFacts("cuda", (13, 7), "sm_137")
    with caplog.at_level(logging.WARNING):
        for pair in products(1):
            for tile, product in zip(tiles.choose_pair(*pair, unknown), pair, strict=True):
                memory = tiles.shared_memory(tile, product, unknown)
                assert memory <= tiles.LEAST_SHARED_MEMORY
    assert not caplog.records


def test_one_kernel_alone_is_warp_specialised() -> None:
    """Triton 3.6 aborts the process for warp-specialised int8 products on Hopper.

    Of its own making: in Gluon, warps are told what to do.
    """
    assert {field.name for field in fields(tiles.Tile)} == {
        "block_m",
        "block_n",
        "block_k",
        "num_warps",
        "num_stages",
        "group_m",
        "loads",
        "programs",
        "is_flat",
        "has_tail",
    }
    folder = Path(tiles.__file__).parent
    sources = [*folder.glob("*.py"), *folder.glob("jinja/*.jinja")]
    assert len(sources) > 10
    found = [path.name for path in sources if "warp_specialize" in path.read_text()]
    assert found == ["stream_kernels.py"]
