"""Weight-only layers of few tokens, without a GPU: tiles, and what the kernels are compiled to."""

from __future__ import annotations

import re

import offline
import pytest
import torch
from test_lowerings_offline import call

from int8moe_compile.lowerings import decode_tiles, tiles
from int8moe_compile.lowerings.tiles import Product
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


def decode_launches(given: ExpertsArguments, arch: str = "sm_90") -> list[offline.Launch]:
    """Return both products of a recorded call."""
    launches = offline.record(given, arch)
    found = [each for each in launches if each.kernel.__name__.startswith("decode_")]
    assert [each.kernel.__name__ for each in found] == ["decode_up_kernel", "decode_down_kernel"]
    return found


def layouts_of(text: str) -> dict[str, str]:
    """Return the layouts of a kernel's text, by name."""
    return dict(re.findall(r"^(#\w+) = (#ttg\.\w+<\{.*\}>)", text, re.M))


LAYOUT = (
    r"sizePerThread = \[1, 1, 2\], threadsPerWarp = \[1, 1, 32\], "
    r"warpsPerCTA = \[(\d+), (\d+), (\d+)\], order = \[2,"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [256, 400, 2880])
def test_lanes_that_are_added_hold_words_of_one_row(dtype: torch.dtype, width: int) -> None:
    """The diagonal of what the tensor cores multiply has sums of four lanes in a row."""
    for launch in decode_launches(call(1, "none", dtype, width)):
        assert launch.arguments["TENSOR_CORES"]
        compiled = offline.compile_launch(launch, "sm_90")
        text = compiled.asm["ttgir"]
        layouts = layouts_of(text)
        calls = re.findall(r'elementwise_inline_asm "[^"]*?mma\.sync[^"]*".*? : (.*?) ->', text)
        assert calls
        for operands in calls:
            names = re.findall(r"tensor<(\d+)x(\d+)x(\d+)x\w+, (#\w+)>", operands)
            assert len(names) == 3 and len(set(names)) == 1, operands
            *_, words, name = names[0]
            assert re.search(LAYOUT, layouts[name]), layouts[name]
            # Of less, lanes would hold other rows, or the same words twice.
            assert int(words) >= 64
        kind = "bf16.bf16" if dtype == torch.bfloat16 else "f16.f16"
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32" in compiled.asm["ptx"]


def test_rows_that_words_cannot_read_are_multiplied_one_by_one() -> None:
    """Tokens that do not begin at a multiple of 16 bytes, and fp32: whole rows then."""
    given = call(1, "none")
    moved = torch.empty(513, dtype=torch.bfloat16)[1:].view(1, 512)
    up, down = decode_launches(given._replace(hidden_states=moved))
    assert not up.arguments["TENSOR_CORES"] and up.arguments["BLOCK_K"] == 512
    assert down.arguments["TENSOR_CORES"]
    assert "mma.sync" not in offline.compile_launch(up, "sm_90").asm["ptx"]


@pytest.mark.parametrize(("width", "is_even"), [(512, True), (400, False)])
def test_masks_are_left_out_where_blocks_divide_the_depth(width: int, is_even: bool) -> None:
    _, down = decode_launches(call(1, "none", I=width))
    assert down.arguments["EVEN_K"] is is_even
    assert down.arguments["BLOCK_K"] == 512


def test_four_lanes_of_a_diagonal() -> None:
    """The matrices of one instruction, as PTX lays them out, by plain sums."""
    torch.manual_seed(0)
    codes, floats = torch.randn(32, 8), torch.randn(32, 8)
    upper, lower = torch.zeros(8, 16), torch.zeros(8, 16)
    columns = torch.zeros(2, 16, 8)
    for lane in range(32):
        row, at = divmod(lane, 4)
        # A lane's four operands of A: rows above and below, first and last eight of the depth.
        for half in range(2):
            place = slice(8 * half + 2 * at, 8 * half + 2 * at + 2)
            upper[row, place] = codes[lane, 2 * half : 2 * half + 2]
            lower[row, place] = codes[lane, 4 + 2 * half : 6 + 2 * half]
            for turn in range(2):
                first = 4 * turn + 2 * half
                columns[turn, place, row] = floats[lane, first : first + 2]
    found = (upper @ columns[0]).diagonal() + (lower @ columns[1]).diagonal()
    wanted = (codes * floats).sum(1).view(8, 4).sum(1)
    torch.testing.assert_close(found, wanted)
    for row in range(8):
        # The lane that diagonal_sums takes it of holds columns 2 * (lane % 4) and the next one.
        lane = next(each for each in range(4 * row, 4 * row + 4) if each % 4 == each >> 3)
        assert 2 * (lane % 4) + (lane & 4 != 0) == row
