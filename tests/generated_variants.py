"""The source that Inductor generates for variants; collected in a process of its own only."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generated import (
    COMBINE,
    COUNT,
    NORM_QUANTIZE,
    PLACE,
    SCATTER,
    block,
    compile_generated,
    kernels_of,
    shapes,
)
from inductor_source import generated_source, launch_order, pretend_cuda
from support import EXPERTS
from torch._inductor.graph import GraphLowering

from int8moe_compile.lowerings import variants
from int8moe_compile.lowerings.tiles import Tile
from int8moe_compile.lowerings.variants import Variant

BOTH = Tile(128, 64, 128, 4, 3, 8, "both", 2)
NARROW = Tile(16, 64, 128, 4, 3)
FUSED = ["fused_up_kernel", "requantize_kernel", "fused_down_kernel"]
DECODE = Variant("decode", Tile(1, 4, 512, 4, 1), Tile(1, 4, 256, 4, 1))
DECODED = ["decode_up_kernel", "requantize_kernel", "decode_down_kernel"]
CASES = {
    "both": (Variant("fused", BOTH, BOTH), 64, [PLACE, "spread_kernel", *FUSED]),
    "any size": (Variant("fused", BOTH, BOTH), "T", [COUNT, SCATTER, "spread_kernel", *FUSED]),
    "pointers": (
        Variant("fused", NARROW, replace(NARROW, loads="weights")),
        64,
        [PLACE, *FUSED],
    ),
    "tail": (
        Variant("fused", replace(BOTH, has_tail=True), replace(BOTH, has_tail=True)),
        64,
        [PLACE, "spread_kernel", *FUSED],
    ),
    "decode": (DECODE, 2, DECODED),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_one_block(name: str) -> None:
    """The norm before and the residual after stay one kernel each."""
    variant, tokens, kernels = CASES[name]
    with variants.forced(variant):
        source = generated_source(block(), shapes(tokens), tokens=300)
    assert launch_order(source) == [NORM_QUANTIZE, *kernels, COMBINE]
    described = len(re.findall(r"TensorDescriptor\.from_tensor\(", source))
    assert described == {"both": 4, "any size": 4, "pointers": 1, "tail": 6, "decode": 0}[name]
    code = "\n".join(line for line in source.splitlines() if not line.startswith("#"))
    assert "torch.ops.int8moe" not in code and "extern_kernels." not in code


@pytest.mark.parametrize("name", CASES)
def test_generated_kernels_compile(name: str, tmp_path: Path) -> None:
    """The wrapper copies a kernel's source with the functions and constants that it uses."""
    variant, tokens, _ = CASES[name]
    with variants.forced(variant):
        source = generated_source(
            block(alpha=1.702, beta=1.0, limit=7.0), shapes(tokens), tokens=300
        )
    with pretend_cuda():
        for kernel in kernels_of(source, tmp_path).values():
            if kernel.fn.__name__ in CASES[name][2]:
                text = compile_generated(kernel, "sm_90")
                assert ".target sm_90" in text
                # A graph passes numbers in fp64, and one of them takes a whole tile along.
                assert ".f64" not in text
                assert ("dp4a.s32.s32" in text) == kernel.fn.__name__.startswith("decode")


def test_one_graph_launches_by_the_number_of_tokens() -> None:
    """What a symbolic T does not want gets a grid of no programs, which nothing launches."""
    narrow = Variant("fused", NARROW, NARROW)
    schedule = variants.Schedule(
        ((8, DECODE), (512, narrow), (1 << 40, Variant("fused", BOTH, BOTH)))
    )
    with variants.forced(schedule):
        source = generated_source(block(), shapes("T"), tokens=300)
    order = launch_order(source)
    fused, decode = [COUNT, SCATTER, *FUSED], DECODED
    wide = [*fused, "spread_kernel"]
    assert sorted(order) == sorted([NORM_QUANTIZE, *decode, *fused, *wide, COMBINE])
    # The codes of tokens are computed once, whatever the steps.
    assert order.count(NORM_QUANTIZE) == 1 and order[-1] == COMBINE
    assert launched(source, 1) == launched(source, 4) == sorted(decode)
    assert launched(source, 5) == launched(source, 256) == sorted(fused)
    assert launched(source, 257) == launched(source, 5000) == sorted(wide)


def test_the_tables_serve_every_size_in_one_graph() -> None:
    """Without being forced: one step launches at every size, and tokens are quantised once."""
    source = generated_source(block(), shapes("T"), tokens=300)
    assert launch_order(source).count(NORM_QUANTIZE) == 1
    for tokens in (1, 4, 48, 49, 192, 193, 640, 641, 5000):
        assert launched(source, tokens) == sorted([COUNT, SCATTER, *FUSED]), tokens
    sized = generated_source(block(), shapes(5000), tokens=5000)
    assert sorted(launch_order(sized)[:3]) == sorted([NORM_QUANTIZE, COUNT, SCATTER])
    assert launch_order(sized)[3:] == [*FUSED, COMBINE]


PRODUCTS = r"torch\.ops\.int8moe\._(wgmma_\w+)\.default\((.*), \[128, [\d, ]*\]\)$"


def deep_shapes(T: int | str) -> list[Any]:
    """Return the shapes of a block's inputs: hidden 512, intermediate 512, 8 experts."""
    inputs = shapes(T)
    inputs[3:7] = [
        ((8, 1024, 512), torch.int8),
        ((8, 1024), torch.float32),
        ((8, 512, 512), torch.int8),
        ((8, 512), torch.float32),
    ]
    return inputs


@pytest.mark.parametrize("T", [5000, "T"])
def test_asynchronous_products_are_called_between_launches(T: int | str) -> None:
    """Each writes a buffer that was made for it and is read behind it; none where none is due."""
    source = generated_source(block(), deep_shapes(T), tokens=5000)
    calls = re.findall(PRODUCTS, source, re.M)
    assert [name for name, _ in calls][-1] == "wgmma_down"
    spread, requantize, combine = (
        [found.start() for found in re.finditer(rf"{name}\w*\.run\(", source)][-1]
        for name in ("spread_kernel", "requantize_kernel", COMBINE)
    )
    up, down = (source.rindex(f"int8moe._{name}.default(") for name in ("wgmma_up", "wgmma_down"))
    assert spread < up < requantize < down < combine
    out = {name: arguments.partition(",")[0] for name, arguments in calls}
    assert out["wgmma_up"] in source[requantize : source.index("\n", requantize)]
    assert out["wgmma_down"] in source[combine : source.index("\n", combine)]
    for tokens in (1, 100, 192) if T == "T" else ():
        assert not any(programs(arguments, tokens) for _, arguments in calls)
    for tokens in (193, 800, 801, 5000) if T == "T" else (5000,):
        due = [name for name, arguments in calls if programs(arguments, tokens)]
        assert due == ["wgmma_up", "wgmma_down"], tokens
        if T == "T":
            assert launched(source, tokens) == sorted(
                [COUNT, SCATTER, "spread_kernel", "requantize_kernel"]
            )


def programs(arguments: str, tokens: int) -> int:
    """Return the programs of an operator's call, its last argument here, at a number of tokens."""
    return evaluated([f"({arguments}, 1, 1, stream="], tokens)[0]


def test_all_steps_read_the_router_weights_of_one_buffer() -> None:
    def function(*args: torch.Tensor) -> torch.Tensor:
        *before, logits, ids = args
        out: torch.Tensor = EXPERTS(*before, torch.softmax(logits, -1), ids)
        return out

    x, _, _, *rest = shapes("T")
    source = generated_source(function, [x, *rest], tokens=300)
    assert len(re.findall(r"empty_strided_cuda\(\(s\d+, 2\), \(2, 1\), torch", source)) == 1


def test_every_step_writes_what_it_reads_by_descriptor() -> None:
    """A step's codes depend on its own launches, although the steps share their buffers."""

    def function(a13: torch.Tensor, a2: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return block(activation_quant="static", a13_scale=a13, a2_scale=a2)(*rest)

    wide = [Variant("fused", tile, tile) for tile in (BOTH, replace(BOTH, group_m=32))]
    scale = ((1,), torch.float32)
    with variants.forced(variants.Schedule(((512, wide[0]), (1 << 40, wide[1])))):
        source = generated_source(function, [scale, scale, *shapes("T")], tokens=300)
    kernels = [COUNT, SCATTER, "spread_kernel", "fused_up_kernel", "fused_down_kernel"]
    assert launched(source, 5) == launched(source, 5000) == sorted(kernels)


def int8_rows(scale: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Compute experts of rows that are codes already."""
    out: torch.Tensor = EXPERTS(*rest, a13_scale=scale)
    return out


@pytest.mark.parametrize("T", [64, 512, "T"])
def test_int8_rows_bring_a_scale_for_each(T: int | str) -> None:
    _, _, _, *rest = shapes(T)
    rows = [((T, 1), torch.float32), ((T, 512), torch.int8), *rest]
    order = launch_order(generated_source(int8_rows, rows, tokens=300))
    assert "fused_up_kernel" in order


@pytest.mark.parametrize(
    ("T", "arch", "has_early"),
    [(1, "sm_90", True), (64, "sm_90", True), (8192, "sm_90", False), (64, "sm_80", False)],
)
def test_launches_before_the_kernel_ahead_ends(T: int, arch: str, has_early: bool) -> None:
    """Ours alone, of few tokens, and not where the user has Inductor launch its own so."""
    source = generated_source(block(), shapes(T), tokens=T, arch=arch)
    ours = sum(name.endswith("_kernel") for name in launch_order(source))
    assert source.count("'launch_pdl': True") == source.count("'PDL': True") == ours * has_early
    with torch._inductor.config.patch("triton.enable_pdl", True):
        source = generated_source(block(), shapes(T), tokens=T, arch=arch)
    assert "'PDL': True" not in source
    if T == 64:
        products = [name for name in launch_order(source) if "tem_fused" in name]
        assert len(products) == 2, "nothing is gained by the same products as launches of their own"


@pytest.mark.parametrize("T", [1, 64, 4096, "T"])
def test_wrappers_in_cpp_get_the_templates(T: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = GraphLowering.run

    def run(self: GraphLowering, *args: Any) -> Any:
        self.cpp_wrapper = True
        try:
            return lower(self, *args)
        finally:
            self.cpp_wrapper = False

    monkeypatch.setattr(GraphLowering, "run", run)
    source = generated_source(block(), shapes(T), tokens=300)
    assert launch_order(source).count("triton_tem_fused") == 2
    assert "launch_pdl': True" not in source


@pytest.mark.parametrize("T", [1, 64])
def test_layers_of_one_graph_share_the_definitions_of_early_kernels(T: int) -> None:
    x, _, _, *rest = shapes(T)

    def function(*args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = EXPERTS(EXPERTS(*args), *args[1:])
        return out

    source = generated_source(function, [x, *rest], tokens=T)
    ours = [name for name in launch_order(source) if name.endswith("_kernel")]
    definitions = re.findall(r"async_compile\.triton\('\w+_kernel'", source)
    # At 64 tokens the second layer's quantisation joins the first one's sum.
    assert len(ours) == 2 * len(definitions) - (T != 1)
    # All but the first of one token, which is itself defined once.
    assert source.count("'launch_pdl': True") == len(definitions) - (T == 1)


@pytest.mark.parametrize(
    ("quant", "changed", "is_old"),
    [
        ("token", None, [True, True]),
        ("token", 6, [False, True]),
        ("token", 1, [False, True]),
        ("token", 3, [True, False]),
        ("none", None, [False, True]),
    ],
    ids=["inputs", "ids", "w13", "w2", "weight-only"],
)
def test_decode_reads_ahead_what_comes_into_the_graph(
    quant: str, changed: int | None, is_old: list[bool]
) -> None:
    """What the graph computes may still be written by the kernel ahead."""

    def function(*args: torch.Tensor) -> torch.Tensor:
        given = [x ^ 1 if number == changed else x for number, x in enumerate(args)]
        out: torch.Tensor = EXPERTS(*given, activation_quant=quant)
        return out

    x, _, _, *rest = shapes(1)
    source = generated_source(function, [x, *rest], tokens=1)
    assert re.findall(r"'IS_OLD': (\w+)", source) == [str(is_true) for is_true in is_old]


@pytest.mark.parametrize("T", [1, 64])
def test_rows_that_no_loop_computes_are_quantised_apart(T: int) -> None:
    """Its kernel lets the next one start early; at one token it comes first, so in turn itself."""

    def function(*args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = EXPERTS(*args)
        return out

    x, _, _, *rest = shapes(T)
    source = generated_source(function, [x, *rest], tokens=T)
    order = launch_order(source)
    assert order.count("requantize_kernel") == 2 and not any("per_fused" in name for name in order)
    assert order[0] == ("requantize_kernel" if T == 1 else PLACE)
    definitions = re.findall(
        r"async_compile\.triton\('requantize_kernel'.*?@triton\.jit", source, re.S
    )
    early = ["'launch_pdl': True" in text for text in definitions]
    assert early == ([False, True] if T == 1 else [True, True])
    assert re.findall(r"'PDL': (\w+)", source).count("2") == (T == 1)


@pytest.mark.parametrize("rows", ["part", "every other", "transposed"])
def test_rows_with_gaps_are_quantised_where_they_are(rows: str) -> None:
    """A loop reads them in place; a kernel of our own would have them copied first."""
    T = 64
    given = {"part": (T, 1024), "every other": (2 * T, 512), "transposed": (512, T)}[rows]

    def function(wide: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        if rows == "part":
            wide = wide.narrow(1, 0, 512)
        else:
            wide = torch.ops.aten.slice(wide, 0, 0, None, 2) if rows == "every other" else wide.t()
        out: torch.Tensor = EXPERTS(wide, *args)
        return out

    x, _, _, *rest = shapes(T)
    source = generated_source(function, [(given, x[1]), *rest], tokens=T)
    order = launch_order(source)
    assert order.count("requantize_kernel") == 1
    assert not any(name.startswith("triton_poi") for name in order[:2]), order


def test_one_graph_launches_early_at_few_tokens() -> None:
    source = generated_source(block(), shapes("T"), tokens=300)
    pattern = r"async_compile\.triton\('fused_up_kernel'.*?@triton\.jit"
    definitions = re.findall(pattern, source, re.S)
    early = ["'launch_pdl': True" in text for text in definitions]
    assert len(definitions) >= 3 and True in early and False in early


@pytest.mark.parametrize("T", [1, 64, 512])
def test_an_infinite_limit_is_none(T: int) -> None:
    limited = generated_source(block(limit=float("inf")), shapes(T), tokens=T)
    assert launch_order(limited) == launch_order(generated_source(block(), shapes(T), tokens=T))
    assert "'LIMIT': inf" not in limited


@pytest.mark.parametrize("offset", [0, 3, 16])
@pytest.mark.parametrize("T", [1, 512])
def test_words_and_descriptors_need_aligned_weights(T: int, offset: int) -> None:
    def function(flat: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        w13 = torch.as_strided(flat, (8, 512, 512), (512 * 512, 512, 1), offset)
        out: torch.Tensor = EXPERTS(rest[0], w13, *rest[1:])
        return out

    x, _, _, _, *rest = shapes(T)
    flat = ((8 * 512 * 512 + 16,), torch.int8)
    order = launch_order(generated_source(function, [flat, x, *rest], tokens=T))
    variant = "decode_up_kernel" if T == 1 else "fused_up_kernel"
    assert (variant in order) == (offset % 16 == 0)


def launched(source: str, tokens: int) -> list[str]:
    """Return the kernels of routing and products that have programs at a number of tokens."""
    launches = [line for line in source.splitlines() if re.search(r"_kernel\w*\.run\(", line)]
    counts = evaluated(launches, tokens)
    names = launch_order("\n".join(launches))
    return sorted(name for name, count in zip(names, counts, strict=True) if count > 0)


def evaluated(launches: list[str], tokens: int) -> list[int]:
    """Return the programs of each launch at a number of tokens."""
    found = []
    for line in launches:
        inside = line[line.index("(") + 1 : line.index(", 1, 1, stream=")]
        depth, start = 0, 0
        for at, letter in enumerate(inside):
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if letter == "," and depth == 0:
                start = at + 1
        symbols = {name: tokens for name in re.findall(r"s\d+", inside)}
        found.append(int(eval(inside[start:], {"min": min, "max": max}, symbols)))
    return found
