"""Every kernel compiled for every architecture without a GPU, with the integer instruction."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import offline
import pytest
import torch

from int8moe_compile.lowerings import tiles, variant_tables, variants
from int8moe_compile.ops.arguments import ExpertsArguments
from int8moe_compile.oracle import MoeProblem, select_int8_moe_backend
from int8moe_compile.schemes import INT8_DYNAMIC_TOKEN, INT8_STATIC_CHANNEL

ONE = torch.empty(1)


def call(
    T: int,
    word: str = "token",
    dtype: torch.dtype = torch.bfloat16,
    I: int = 256,  # noqa: E741
    *,
    H: int = 512,
    E: int = 8,
    K: int = 4,
    gated: bool = True,
) -> ExpertsArguments:
    """Return arguments of a call on empty CPU tensors, with gpt-oss' gate."""
    rows = 2 * I if gated else I
    empty, codes = torch.empty, {"dtype": torch.int8}
    return ExpertsArguments(
        empty(T, H, dtype=dtype),
        empty(E, rows, H, **codes),
        empty(E, rows),
        empty(E, H, I, **codes),
        empty(E, H),
        empty(T, K, dtype=dtype),
        empty(T, K, dtype=torch.int64),
        activation_quant=word,
        gated=gated,
        alpha=1.702,
        beta=1.0,
        limit=7.0,
        w13_bias=empty(E, rows, dtype=dtype),
        w2_bias=empty(E, H, dtype=dtype),
    )


@pytest.mark.parametrize("arch", offline.SHARED_MEMORY)
@pytest.mark.parametrize("tokens", [8, 4096])
def test_products_use_the_integer_units(arch: str, tokens: int) -> None:
    launches = offline.record_apart(call(tokens), arch)
    products = [each for each in launches if each.kernel.__name__ in ("up_kernel", "down_kernel")]
    assert len(products) == 2
    for launch in products:
        compiled = offline.compile_launch(launch, arch)
        text = offline.assembly(compiled)
        assert re.search(offline.INTEGER_INSTRUCTION[arch], text), (
            launch.kernel.__name__,
            offline.matrix_instructions(text),
        )
        assert compiled.metadata.shared <= offline.SHARED_MEMORY[arch]
        if arch in ("sm_80", "sm_90"):
            arguments = launch.arguments
            is_up = launch.kernel.__name__ == "up_kernel"
            tile = tiles.Tile(
                arguments["BLOCK_M"],
                arguments["BLOCK_N"],
                arguments["BLOCK_K"],
                launch.options["num_warps"],
                launch.options["num_stages"],
            )
            product = tiles.Product(tokens * 4, 8, 0, 0, 2 if is_up else 1)
            facts = offline.facts_of(arch)
            assert compiled.metadata.shared == tiles.shared_memory(tile, product, facts)


def test_hopper_multiplies_by_warp_groups() -> None:
    for launch in offline.record_apart(call(4096), "sm_90"):
        if launch.kernel.__name__ in ("up_kernel", "down_kernel"):
            text = offline.assembly(offline.compile_launch(launch, "sm_90"))
            assert "wgmma.mma_async" in text and ".s32.s8.s8" in text


ASYNC_CALLS: dict[str, dict[str, Any]] = {
    "silu": {"alpha": 1.0, "beta": 0.0, "limit": None, "w13_bias": None, "w2_bias": None},
    "gpt-oss": {},
    "static": {"activation_quant": "static", "a13_scale": ONE, "a2_scale": ONE},
    "fp32": {"hidden_states": torch.empty(4096, 512)},
    "not gated": {"gated": False, "activation": "relu2", "limit": None, "beta": 0.0},
}


@pytest.mark.parametrize("name", ASYNC_CALLS)
@pytest.mark.parametrize("tiles_of_both", variant_tables.ASYNC_PAIRS)
def test_asynchronous_products_keep_one_in_flight(
    name: str, tiles_of_both: tuple[tiles.Tile, tiles.Tile]
) -> None:
    """A wait for all of them comes once a tile; in the loop and the step before it one goes on."""
    case = call(4096, I=512)._replace(**ASYNC_CALLS[name])
    up, down = tiles_of_both
    panels = 2 if case.gated else 1
    if not case.gated:
        case = case._replace(w13=torch.empty(8, 512, 512, dtype=torch.int8))
        case = case._replace(w13_scale=torch.empty(8, 512), w13_bias=None)
        up = dataclasses.replace(up, block_n=2 * up.block_n)
    with variants.forced(variants.Variant("fused", up, down)):
        launches = offline.record(case, "sm_90")
    found = {launch.kernel.__name__: launch for launch in launches}
    for kernel, tile, n in (("wgmma_up_kernel", up, panels), ("wgmma_down_kernel", down, 1)):
        compiled = offline.compile_launch(found[kernel], "sm_90")
        text = offline.assembly(compiled)
        instructions = offline.matrix_instructions(text)
        assert instructions and all("wgmma" in i and ".s32.s8.s8" in i for i in instructions)
        waits = re.findall(r"wgmma\.wait_group\S*\s+(\d+)", text)
        parts = 2 if tile.has_tail else 1
        assert sorted(waits) == ["0"] * parts + ["1"] * 2 * parts
        # What fills a buffer waits for all warps that read it, as each waits for itself alone.
        for after in re.split(r"wgmma\.wait_group\S*\s+1;", text)[1:]:
            assert "bar.sync" in after[: after.index("cp.async.bulk.tensor")]
        product = tiles.Product(16384, 8, 512, 512, n)
        shared = tiles.shared_memory(tile, product, offline.facts_of("sm_90"))
        # fp32 is stored by the threads that computed it.
        exchange = 1024 * tile.num_warps if name == "fp32" else 0
        assert compiled.metadata.shared == shared - exchange


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_the_other_kernels_compile(arch: str) -> None:
    names = set()
    calls = (
        call(8),
        call(5000)._replace(expert_map=torch.empty(16, dtype=torch.int32)),
        call(8, "tensor"),
        call(8, "none"),
    )
    for each in calls:
        for launch in offline.record_apart(each, arch):
            names.add(launch.kernel.__name__)
            text = offline.assembly(offline.compile_launch(launch, arch))
            if launch.kernel.__name__ == "quantize_kernel" and arch == "sm_90":
                assert "div.rn.f32" in text and "div.full" not in text
    assert names == {
        "count_kernel",
        "place_kernel",
        "scatter_kernel",
        "amax_kernel",
        "quantize_kernel",
        "up_kernel",
        "down_kernel",
        "combine_kernel",
    }


def test_weight_only_converts_codes_in_the_tile() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for launch in offline.record_apart(call(4096, "none", dtype), "sm_90"):
            if launch.kernel.__name__ in ("up_kernel", "down_kernel"):
                text = offline.assembly(offline.compile_launch(launch, "sm_90"))
                assert re.search(r"wgmma\S*f32\.(bf16|f16)", text)
    for launch in offline.record_apart(call(8, "none", torch.float32), "sm_90"):
        if launch.kernel.__name__ == "up_kernel":
            text = offline.assembly(offline.compile_launch(launch, "sm_90"))
            assert "tf32" not in text


# From integers to floats: PTX, and the instructions of CDNA.
PACKED = r"fma\.rn\.bf16x2|sub\.rn\.f16x2"
CONVERSION = r"cvt\.rn\.\w*f\d+\.[su]\d+|v_cvt_f\d+_i\d+"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [8, 40, 4096])
def test_weight_only_codes_are_not_converted_one_by_one(
    arch: str, dtype: torch.dtype, tokens: int
) -> None:
    found = 0
    for launch in offline.record_apart(call(tokens, "none", dtype), arch):
        name, arguments = launch.kernel.__name__, launch.arguments
        if name not in ("up_kernel", "down_kernel"):
            continue
        found += 1
        compiled = offline.compile_launch(launch, arch)
        text = offline.assembly(compiled)
        is_plain, is_packed = (re.search(pattern, text) for pattern in (CONVERSION, PACKED))
        assert (bool(is_plain), bool(is_packed)) == (arch == "gfx942", arch != "gfx942"), name
        sides = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
        tile = tiles.Tile(*(arguments[side] for side in sides), *launch.options.values())
        product = tiles.Product(tokens * 4, 8, 0, 0, 2 if name == "up_kernel" else 1, 2)
        if arch.startswith("sm"):
            shared = tiles.shared_memory(tile, product, offline.facts_of(arch))
            assert compiled.metadata.shared == shared
        assert compiled.metadata.shared <= offline.SHARED_MEMORY[arch]
    assert found == 2


def test_sm_75_is_refused_where_the_int8_product_does_not_compile() -> None:
    """triton-lang/triton#9349: the compiler fails, so the oracle says no before it is asked."""
    from int8moe_compile.compat import int8_dot_compiles

    assert not int8_dot_compiles((7, 5), is_rocm=False)
    facts = offline.DeviceFacts("cuda", (7, 5), "sm_75", 65536, 40, int8_dot=False)
    problem = MoeProblem(8, 2, 512, 256)
    with pytest.raises(ValueError, match="int8 dot"):
        select_int8_moe_backend(
            problem, INT8_STATIC_CHANNEL, INT8_DYNAMIC_TOKEN, "triton", device=facts
        )
