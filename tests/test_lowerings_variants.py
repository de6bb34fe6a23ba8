"""Variants as data, their kernels compiled for an H200, and what graphs make of them."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from dataclasses import replace
from typing import Any

import offline
import own_process
import pytest
import torch
from test_lowerings_offline import call
from test_lowerings_tiles import facts, products

from int8moe_compile import compat_inductor
from int8moe_compile.lowerings import tiles, variant_candidates, variants
from int8moe_compile.lowerings.tiles import Tile
from int8moe_compile.lowerings.variants import Features, Schedule, Variant
from int8moe_compile.ops.arguments import ExpertsArguments

FIRST = Tile(128, 64, 128, 4, 3, 8, "both", 2)
SECOND = Tile(128, 256, 128, 8, 3, 8, "both", 1, True)


@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "gfx942"])
def test_candidates_fit_and_the_measured_one_is_first(arch: str) -> None:
    device = facts(arch)
    for up, down in products(1):
        found = variant_candidates.candidates(up, down, device, Features())
        assert found[0] == Variant("apart", *tiles.choose_pair(up, down, device))
        assert len(set(found)) == len(found)
        for variant in found[1:]:
            assert variant.name in ("fused", "decode")
            assert arch == "sm_90" or {variant.up.loads, variant.down.loads} == {"pointers"}
            if variant.name == "fused":
                for tile, product in ((variant.up, up), (variant.down, down)):
                    assert tiles.shared_memory(tile, product, device) <= tiles.limit_of(device)
            else:
                assert up.contributions <= variants.DECODE_CONTRIBUTIONS
                assert variant.up.block_k >= up.depth and variant.down.block_k >= down.depth


def test_what_was_measured_is_chosen_on_hopper_alone() -> None:
    for (up, down), quant in itertools.product(products(1), ("token", "static")):
        blackwell = replace(facts("sm_90"), capability=(10, 0), arch="sm_100")
        for device in (facts("sm_80"), facts("gfx942"), blackwell):
            assert variants.choose(up, down, device, Features(quant)).name == "apart"
        chosen = variants.choose(up, down, facts("sm_90"), Features(quant))
        rows = tiles.rows_per_expert(up.contributions, up.experts)
        is_deep = min(up.depth, down.depth) >= 128 and up.depth % 16 == down.depth % 16 == 0
        is_even = up.depth % 128 == down.depth % 128 == 0
        tokens, codes = up.contributions // up.top_k, 3 * up.depth * up.width
        is_spread = codes <= 16 << 20 and 2 * up.contributions <= up.experts
        is_decode = tokens == 1 or (tokens <= 4 and is_spread)
        is_early = up.contributions <= 8192
        expected = "fused" if rows > 24 or not is_even or is_early else "apart"
        expected = "decode" if is_decode else expected
        assert chosen.name == (expected if is_deep else "apart")
        if chosen.name == "fused":
            assert chosen.up.block_m == chosen.down.block_m
            assert chosen in variant_candidates.candidates(
                up, down, facts("sm_90"), Features(quant)
            )


@pytest.mark.parametrize(("E", "H", "I"), [(64, 2048, 1024), (8, 4096, 14336), (32, 2880, 2880)])
def test_the_schedule_of_a_symbolic_size_chooses_as_each_size_does(E: int, H: int, I: int) -> None:  # noqa: E741
    up, down = tiles.Product(1, E, H, I, 2, 1, 4), tiles.Product(1, E, I, H, 1, 1, 4)
    found = variants.schedule(up, down, facts("sm_90"), Features())
    assert found is not None and found.steps[-1][0] == variants.EVERY_SIZE
    assert all(variant.name == "fused" for _, variant in found.steps)
    for rows in (25, 40, 62, 100, 300, 600, 1000):
        sized = [replace(product, contributions=rows * E) for product in (up, down)]
        chosen = next(variant for most, variant in found.steps if rows * E <= most)
        assert chosen == variants.choose(*sized, facts("sm_90"), Features())
    for arch, has in (("sm_80", Features()), ("sm_90", Features("tensor"))):
        assert variants.schedule(up, down, facts(arch), has) is None


def loads_of(variant: Variant) -> set[str]:
    return {variant.up.loads, variant.down.loads}


def test_asynchronous_products_are_chosen_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = tiles.Product(65536, 64, 2048, 1024, 2, 1, 8), tiles.Product(65536, 64, 1024, 2048)
    hopper = facts("sm_90")
    assert loads_of(variants.choose(up, down, hopper, Features())) == {"async"}
    found = variants.schedule(up, down, hopper, Features())
    assert found is not None and loads_of(found.steps[-1][1]) == {"async"}
    # What they do not take is computed as before there were any, not by "apart".
    shallow = replace(up, width=256), replace(down, depth=256)
    for has, pair in (
        (Features(is_int8_input=True), (up, down)),
        (Features(is_weight_on_input=True), (up, down)),
        (Features(), shallow),
    ):
        assert loads_of(variants.choose(*pair, hopper, has)) == {"weights", "both"}
        found = variants.schedule(*pair, hopper, has)
        assert found is not None and loads_of(found.steps[-1][1]) == {"weights", "both"}
    monkeypatch.setattr(variants.compat_inductor, "gluon_compiles", lambda: False)
    assert loads_of(variants.choose(up, down, hopper, Features())) == {"weights", "both"}


@pytest.mark.parametrize(
    ("release", "interpret", "expected"),
    [("3.6.0", "0", True), ("3.7.1", "0", True), ("3.8.0", "0", False), ("3.7.1", "1", False)],
)
def test_gluon_is_trusted_in_releases_that_were_tried(
    release: str, interpret: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)
    assert compat_inductor.gluon_compiles.__wrapped__() is expected


def test_a_forced_variant_yields_to_calls_that_it_does_not_take() -> None:
    up, down = next(pair for pair in products(1) if pair[0].contributions == 16 * pair[0].top_k)
    device, wanted = facts("sm_90"), Variant("fused", FIRST, SECOND)
    with variants.forced(wanted):
        assert variants.choose(up, down, device, Features()) == wanted
        for features in (
            Features("tensor"),
            Features("none"),
            Features(is_int8_input=True),
            Features(is_weight_on_input=True),
            Features(has_plain_weights=False),
        ):
            assert variants.choose(up, down, device, features).name == "apart"
        assert variants.choose(up, down, facts("sm_80"), Features()).name == "apart"
        odd = replace(up, depth=2040)
        assert variants.choose(odd, down, device, Features()).name == "apart"
    assert variants.choose(up, down, device, Features()).up.loads == "stream"


def test_the_same_products_are_chosen_only_for_launches_that_overlap() -> None:
    device = facts("sm_90")
    for up, down in products(1):
        chosen = variants.choose(up, down, device, Features())
        late = variants.choose(up, down, device, Features(), is_early=False)
        if chosen.up.loads == "stream":
            assert late != chosen and late.up.loads != "stream"
        else:
            is_same_products = chosen.name == "fused" and chosen.up.loads == "pointers"
            assert late == (replace(chosen, name="apart") if is_same_products else chosen)
        with variants.in_turn():
            in_turn = variants.choose(up, down, device, Features())
        assert in_turn == (chosen if chosen.up.loads == "stream" else late)


SMALL = Tile(16, 64, 128, 4, 3)
EARLY: dict[str, tuple[int, Variant, dict[str, Any]]] = {
    "decode": (1, Variant("decode", Tile(1, 4, 512, 4, 1), Tile(1, 4, 256, 4, 1)), {}),
    "one launch of routing": (512, Variant("fused", SMALL, SMALL), {}),
    "two launches of routing": (1100, Variant("fused", SMALL, SMALL), {}),
    "both by descriptor": (1100, Variant("fused", FIRST, SECOND), {}),
    "codes as input": (
        64,
        Variant("fused", SMALL, SMALL),
        {
            "hidden_states": torch.empty(64, 512, dtype=torch.int8),
            "a13_scale": torch.empty(64),
            "out_dtype": torch.bfloat16,
        },
    ),
}
# These read before they wait: weights, and routing that is older than the kernel ahead.
READS_AHEAD = ("decode_up_kernel", "decode_down_kernel", "fused_down_kernel")


@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize(("arch", "is_early"), [("sm_90", True), ("sm_80", False)])
def test_kernels_of_few_tokens_start_before_those_ahead_end(
    name: str, arch: str, is_early: bool
) -> None:
    """All but the first of a call. Before they wait they store nothing and read what is old."""
    T, variant, changes = EARLY[name]
    if arch == "sm_80" and variant.up.loads == "both":
        pytest.skip("descriptors are Hopper's")
    case = call(T)._replace(**changes)
    with variants.forced(variant):
        launches = offline.record(case, arch)
    options = [launch.options.get("launch_pdl", False) for launch in launches]
    assert options == [False, *(len(launches) - 1) * [is_early]]
    for launch in launches:
        text = offline.assembly(offline.compile_launch(launch, arch))
        assert ("griddepcontrol.wait" in text) == is_early
        if not is_early:
            continue
        kernel = launch.kernel.__name__
        ahead = text[: text.index("griddepcontrol.wait")]
        assert not re.search(r"\b(st|atom|red)\.\S*global", ahead), kernel
        reads = re.findall(r"\bld\.global\S* .*?\[(\S+?)[\] ]", ahead)
        assert not reads or kernel in READS_AHEAD, (kernel, reads)
        if kernel.startswith("decode"):
            assert "evict_first" in ahead
        elif kernel.startswith("fused_down"):
            assert "prefetch.global.L2" in ahead


def test_decode_waits_first_for_what_is_new_and_with_nothing_to_do() -> None:
    """What the graph computes (not IS_OLD) is read after the wait; a dead contribution waits."""
    T, variant, _ = EARLY["decode"]
    with variants.forced(variant):
        launches = offline.record(call(T), "sm_90")
    waits = {}
    for launch in launches:
        name = launch.kernel.__name__
        if name.startswith("decode"):
            old = offline.assembly(offline.compile_launch(launch, "sm_90"))
            waits[name] = old.count("griddepcontrol.wait")
            new = replace(launch, arguments={**launch.arguments, "IS_OLD": False})
            text = offline.assembly(offline.compile_launch(new, "sm_90"))
            assert "ld.global" not in text[: text.index("griddepcontrol.wait")], name
    assert waits == {"decode_up_kernel": 2, "decode_down_kernel": 1}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_kernels_start_early_up_to_8192_contributions(arch: str) -> None:
    is_able = arch in ("sm_90", "sm_100")
    found = [variants.starts_early(count, offline.facts_of(arch)) for count in (1, 8192, 8193)]
    assert found == [is_able, is_able, False]


def test_many_tokens_launch_in_turn() -> None:
    launches = offline.record(call(8192), "sm_90")
    assert not any(launch.options.get("launch_pdl") for launch in launches)
    assert not any(launch.arguments.get("PDL") for launch in launches)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((), "rising bounds"),
        (((64, "fused"),), "rising bounds"),
        (((64, "fused"), (64, "fused"), (1 << 40, "fused")), "rising bounds"),
        (((64, "decode"), (1 << 40, "apart")), "at least one fused, got .*apart"),
        (((1 << 40, "decode"),), "at least one fused"),
    ],
)
def test_schedules_that_would_launch_nothing_are_refused(
    steps: tuple[tuple[int, str], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(tuple((most, Variant(name, FIRST, SECOND)) for most, name in steps))


def compiled(case: ExpertsArguments, variant: Variant) -> dict[str, tuple[str, int]]:
    """Return the assembly and the shared memory of each kernel of a variant, for sm_90."""
    with variants.forced(variant):
        launches = offline.record(case, "sm_90")
    found = {}
    for launch in launches:
        result = offline.compile_launch(launch, "sm_90")
        found[launch.kernel.__name__] = (offline.assembly(result), result.metadata.shared)
    return found


def test_prefill_loads_by_descriptor_and_multiplies_by_warp_groups() -> None:
    case = call(4096)
    case = case._replace(w13_bias=None, w2_bias=None, limit=None)
    found = compiled(case, Variant("fused", FIRST, SECOND))
    assert set(found) == {
        "count_kernel",
        "scatter_kernel",
        "spread_kernel",
        "fused_up_kernel",
        "requantize_kernel",
        "fused_down_kernel",
        "combine_kernel",
    }
    for name in ("fused_up_kernel", "fused_down_kernel"):
        text, shared = found[name]
        assert re.search(r"wgmma\.mma_async\S*\.s32\.s8\.s8", text)
        assert "cp.async.bulk.tensor" in text
        assert shared <= offline.SHARED_MEMORY["sm_90"]
    # Gate and up are one product, so that a step waits for the tensor cores once.
    text = found["fused_up_kernel"][0]
    assert "m64n128k32" in text and text.count("wgmma.wait_group") == 1


def test_descriptors_of_weights_alone_and_static_codes() -> None:
    weights = replace(FIRST, loads="weights", block_m=64, programs=0)
    case = call(512, "static")._replace(a13_scale=torch.empty(1), a2_scale=torch.empty(1))
    variant = Variant("fused", weights, replace(weights, block_n=128))
    found = compiled(case, variant)
    with variants.forced(variant):
        names = [launch.kernel.__name__ for launch in offline.record(case, "sm_90")]
    # That of the tokens; the intermediate leaves its product as codes.
    assert names.count("requantize_kernel") == 1
    for name in ("fused_up_kernel", "fused_down_kernel"):
        assert "cp.async.bulk.tensor" in found[name][0]


@pytest.mark.parametrize("quant", ["token", "static", "none"])
def test_decode_routes_and_sums_in_its_products(quant: str) -> None:
    """Beside them one launch quantises tokens, and one the intermediate where it is not static."""
    variant = Variant("decode", Tile(1, 4, 512, 4, 1), Tile(1, 4, 256, 4, 1))
    case = call(1, quant)
    if quant == "static":
        case = case._replace(a13_scale=torch.empty(1), a2_scale=torch.empty(1))
    with variants.forced(variant):
        launches = offline.record(case, "sm_90")
    names = [launch.kernel.__name__ for launch in launches]
    before, between = {"token": (1, 1), "static": (1, 0), "none": (0, 0)}[quant]
    quantize = ["requantize_kernel"]
    assert names == [
        *before * quantize,
        "decode_up_kernel",
        *between * quantize,
        "decode_down_kernel",
    ]
    for name, (text, _) in compiled(case, variant).items():
        if name not in quantize:
            # Weight-only: as many codes as floats in 16 bytes, or those would change threads.
            words = 2 if quant == "none" else 4
            assert re.search(rf"ld\.global\S*evict_first\S*\.v{words}", text)


def test_one_token_and_few_of_small_experts_decode() -> None:
    device = facts("sm_90")
    for tokens, experts, K, H, I, is_decode in (  # noqa: E741
        (1, 8, 2, 4096, 14336, True),
        (2, 8, 2, 4096, 14336, False),
        (4, 128, 8, 2048, 768, True),
        (5, 128, 8, 2048, 768, False),
        (4, 16, 8, 2048, 768, False),
    ):
        for a_bytes, quant in ((1, "token"), (2, "none"), (4, "none")):
            up = tiles.Product(tokens * K, experts, H, I, 2, a_bytes, K)
            down = tiles.Product(tokens * K, experts, I, H, 1, a_bytes, K)
            chosen = variants.choose(up, down, device, Features(quant))
            assert (chosen.name == "decode") == (is_decode and a_bytes != 4)


def test_generated_source_of_variants() -> None:
    own_process.run("generated_variants.py", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
