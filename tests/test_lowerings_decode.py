"""Weight-only layers of few tokens, without a GPU: tiles, and what the kernels are compiled to."""

from __future__ import annotations

import contextlib
import re

import offline
import own_process
import pytest
import torch
from test_lowerings_offline import call

from int8moe_compile.lowerings import decode_tiles, eager, tiles, variants
from int8moe_compile.lowerings.tiles import Product, Tile
from int8moe_compile.lowerings.variants import Variant
from int8moe_compile.ops.arguments import ExpertsArguments

# Experts, experts per token, hidden, intermediate -> columns, depth and warps of both products.
MODELS = {
    "Qwen3-30B-A3B": ((128, 8, 2048, 768), (4, 512, 1), (1, 256, 1)),
    "Qwen1.5-MoE-A2.7B": ((60, 4, 2048, 1408), (4, 512, 1), (1, 512, 1)),
    "OLMoE-1B-7B": ((64, 8, 2048, 1024), (4, 256, 1), (1, 256, 1)),
    "Mixtral-8x7B": ((8, 2, 4096, 14336), (1, 512, 1), (2, 512, 2)),
    "DeepSeek-V3": ((256, 8, 7168, 2048), (1, 512, 1), (2, 256, 4)),
    "gpt-oss-20b": ((32, 4, 2880, 2880), (1, 512, 1), (2, 256, 4)),
}


def pair_of(E: int, K: int, H: int, I: int, a_bytes: int) -> tuple[Product, Product]:  # noqa: E741
    """Return the products of one token."""
    up = Product(K, E, H, I, 2, a_bytes, K)
    return up, Product(K, E, I, H, 1, a_bytes, K)


@pytest.mark.parametrize("model", MODELS)
def test_tiles_beside_floats_are_those_measured(model: str) -> None:
    sizes, up, down = MODELS[model]
    found = decode_tiles.choose_pair(*pair_of(*sizes, a_bytes=2))
    assert [(t.block_n, t.block_k, t.num_warps) for t in found] == [up, down]


def test_tiles_beside_codes_have_whole_rows() -> None:
    for sizes, _, _ in MODELS.values():
        for a_bytes in (1, 4):
            products = pair_of(*sizes, a_bytes=a_bytes)
            for tile, product in zip(decode_tiles.choose_pair(*products), products, strict=True):
                assert tile.block_k == tiles.whole_row(product.depth)


def decode_launches(given: ExpertsArguments, *, is_forced: bool = False) -> list[offline.Launch]:
    """Return both products of a recorded call; is_forced: where no table chooses them."""
    decode = variants.decode_variant(*eager.layer_products(given))
    assert decode is not None
    with variants.forced(decode) if is_forced else contextlib.nullcontext():
        launches = offline.record(given, "sm_90")
    found = [each for each in launches if each.kernel.__name__.startswith("decode_")]
    assert [each.kernel.__name__ for each in found] == ["decode_up_kernel", "decode_down_kernel"]
    return found


def layer(
    K: int = 2,
    H: int = 512,
    I: int = 384,  # noqa: E741
    dtype: torch.dtype = torch.bfloat16,
    *,
    gated: bool = True,
) -> ExpertsArguments:
    """Return arguments of one token's call on empty CPU tensors; up to 16 experts."""
    return call(1, "none", dtype, I, H=H, E=max(2, K), K=K, gated=gated)


LAYOUT = (
    r"sizePerThread = \[1, 1, 2\], threadsPerWarp = \[1, 1, 32\], "
    r"warpsPerCTA = \[\d+, \d+, \d+\], order = \[2,"
)


def assert_lanes_hold_words_of_one_row(launch: offline.Launch) -> str:
    """Compile a product; returns its assembly."""
    assert launch.arguments["TENSOR_CORES"]
    compiled = offline.compile_launch(launch, "sm_90")
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)", text, re.M))
    calls = re.findall(r'elementwise_inline_asm "[^"]*?mma\.sync[^"]*".*? : (.*?) ->', text)
    assert calls
    for operands in calls:
        names = re.findall(r"tensor<(\d+)x(\d+)x(\d+)x\w+, (#\w+)>", operands)
        assert len(names) == 3 and len(set(names)) == 1, operands
        *_, words, name = names[0]
        assert re.search(LAYOUT, layouts[name]), layouts[name]
        # Of less, lanes would hold other rows, or the same words twice.
        assert int(words) >= 64
    return offline.assembly(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", [528, 1024])
@pytest.mark.parametrize(("K", "gated"), [(1, True), (2, False), (3, True), (8, True), (16, False)])
def test_lanes_that_are_added_hold_words_of_one_row(
    K: int, gated: bool, H: int, dtype: torch.dtype
) -> None:
    """The diagonal of what the tensor cores multiply has sums of four lanes in a row."""
    given = layer(K, H, 400, dtype, gated=gated)
    seconds = decode_tiles.float_second(tiles.whole_slots(K))
    for pair in zip(decode_tiles.FLOAT_FIRST, seconds, strict=True):
        with variants.forced(Variant("decode", *pair)):
            launches = decode_launches(given)
        for launch, tile in zip(launches, pair, strict=True):
            assert launch.arguments["BLOCK_K"] == tile.block_k
            text = assert_lanes_hold_words_of_one_row(launch)
            kind = "f16.f16" if dtype == torch.float16 else "bf16.bf16"
            assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32" in text


@pytest.mark.parametrize("sizes", [(2, 4096, 1536), (4, 2880, 2048), (8, 2048, 2816)], ids=str)
def test_large_experts_are_multiplied_so_by_default(sizes: tuple[int, int, int]) -> None:
    given = layer(*sizes)
    for launch in decode_launches(given):
        assert_lanes_hold_words_of_one_row(launch)
        assert launch.arguments["BLOCK_K"] in (256, 512)


def moved(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another one that begins two bytes behind a multiple of 16."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def test_rows_that_words_cannot_read_have_tiles_of_whole_rows() -> None:
    """Tokens that do not begin at a multiple of 16 bytes, in four warps; fp32 between products."""
    given = layer(8, 7168, 128)
    tokens = given._replace(hidden_states=moved(given.hidden_states))
    up, down = decode_launches(tokens)
    assert not up.arguments["TENSOR_CORES"] and down.arguments["TENSOR_CORES"]
    assert (up.arguments["BLOCK_N"], up.arguments["BLOCK_K"]) == (2, 8192)
    assert up.options["num_warps"] == 4
    assert "mma.sync" not in offline.compile_launch(up, "sm_90").asm["ptx"]
    up, down = decode_launches(layer(2, 512, 14336)._replace(out_dtype=torch.float32))
    assert up.arguments["TENSOR_CORES"] and not down.arguments["TENSOR_CORES"]
    assert (down.arguments["BLOCK_K"], down.options["num_warps"]) == (16384, 8)
    up, down = decode_launches(
        layer(2, 512, 256, torch.float32)._replace(out_dtype=torch.bfloat16), is_forced=True
    )
    assert not up.arguments["TENSOR_CORES"] and up.arguments["BLOCK_K"] == 512
    assert down.arguments["TENSOR_CORES"] and down.arguments["BLOCK_K"] == 512


def test_other_tiles_are_multiplied_one_by_one() -> None:
    """Their layouts may be others, by which rows would be added to each other."""
    with variants.forced(Variant("decode", Tile(1, 4, 512, 4, 1), Tile(1, 4, 256, 4, 1))):
        for launch in decode_launches(layer(I=256)):
            assert not launch.arguments["TENSOR_CORES"]
            assert "mma.sync" not in offline.compile_launch(launch, "sm_90").asm["ptx"]


@pytest.mark.parametrize(("H", "is_even"), [(1024, True), (1040, False)])
def test_masks_are_left_out_where_blocks_divide_the_depth(H: int, is_even: bool) -> None:
    up, _ = decode_launches(layer(H=H))
    assert up.arguments["EVEN_K"] is is_even
    text = offline.assembly(offline.compile_launch(up, "sm_90"))
    loads = re.findall(r"(@%p\d+ )?ld\.global\S*evict_first\S*\.v2\.b32", text)
    assert loads and {bool(mask) for mask in loads} == {not is_even}


# What makes floats of the bytes of a word, by instruction: selectors and constants.
CONVERSION = re.compile(
    r"(prmt\.b32) \w+, \w+, (\w+, \w+);|mov\.b32 (factor|offset), (\w+);|"
    r"(xor\.b32) \w+, %?\w+, (0x80808080);|((?:fma|sub)\.rn\.\w+) "
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_become_the_floats_that_they_become_elsewhere(dtype: torch.dtype) -> None:
    """Beside words of floats by the instructions of tile_math.codes_to_float."""
    given = layer(dtype=dtype)
    products = decode_launches(given), offline.record_apart(given, "sm_90")
    ups = [next(each for each in p if each.kernel.__name__.endswith("up_kernel")) for p in products]
    here, there = (
        {tuple(filter(None, found)) for found in CONVERSION.findall(offline.assembly(compiled))}
        for compiled in (offline.compile_launch(up, "sm_90") for up in ups)
    )
    assert len(there) >= 5 and here == there


def test_diagonals_have_the_sums_of_four_lanes() -> None:
    """What PTX says of the instruction's operands, with those that the assembly gives it."""
    up, _ = decode_launches(layer())
    text = " ".join(offline.assembly(offline.compile_launch(up, "sm_90")).split())
    found = re.findall(r"mma\.sync\S* (\{.*?\}), \{(.*?)\}, \{(.*?)\}, \{(.*?)\};", text)
    (_, first, one, carried), (_, second, other, zeros) = found[:2]
    assert first == second and zeros == "zero, zero, zero, zero"
    assert re.fullmatch(r"%\w+, %\w+, zero, zero", carried)
    names = {f"w{i + 1}": slice(2 * i, 2 * i + 2) for i in range(4)}
    parts = {f"a{i + 1}": slice(2 * i, 2 * i + 2) for i in range(4)}
    torch.manual_seed(0)
    codes, floats = torch.randn(32, 8), torch.randn(32, 8)
    rows, columns = torch.zeros(16, 16), torch.zeros(2, 16, 8)
    for lane in range(32):
        row, at = divmod(lane, 4)
        for index, name in enumerate(first.split(", ")):
            # In turn of the upper and lower rows, of the first and last eight of the depth.
            place = 8 * (index // 2) + 2 * at
            rows[row + 8 * (index % 2), place : place + 2] = codes[lane, names[name]]
        for turn, given in enumerate((one, other)):
            for half, name in enumerate(given.split(", ")):
                place = 8 * half + 2 * at
                columns[turn, place : place + 2, row] = floats[lane, parts[name]]
    sums = (rows[:8] @ columns[0]).diagonal() + (rows[8:] @ columns[1]).diagonal()
    torch.testing.assert_close(sums, (codes * floats).sum(1).view(8, 4).sum(1))
    # The lane that is taken holds columns 2 * (lane % 4) and the next one of row lane // 4.
    assert "shr.u32 row, lane, 3; and.b32 column, lane, 3; setp.eq.u32 is_mine, row, column" in text
    assert "and.b32 lane, lane, 4; setp.ne.u32 is_odd, lane, 0; selp.f32 sum" in text
    taken = [lane for lane in range(32) if lane >> 3 == lane & 3]
    assert [(lane // 4, 2 * (lane % 4) + (lane & 4 != 0)) for lane in taken] == [
        (row, row) for row in range(8)
    ]


def test_generated_source_of_decode() -> None:
    own_process.run("generated_decode.py", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
