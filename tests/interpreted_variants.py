"""Every variant's kernels in Triton's interpreter; collected in a process of its own only.

TRITON_INTERPRET decides when a kernel is defined, so test_lowerings_interpreter.py starts this.
"""

from __future__ import annotations

from dataclasses import replace

import interpreter  # noqa: F401  (first: it sets TRITON_INTERPRET)
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from code_values import rows_of_every_significand
from gpu_cases import CASES
from support import Problem, assert_close, problem, with_scheme

from int8moe_compile.lowerings import (
    eager,
    eager_variants,
    tile_math,
    tiles,
    variant_rows,
    variants,
)
from int8moe_compile.lowerings.tiles import Tile
from int8moe_compile.lowerings.variants import Variant
from int8moe_compile.ops import quantize
from int8moe_compile.ops.arguments import ExpertsArguments
from int8moe_compile.oracle import DeviceFacts

HOPPER = DeviceFacts("cuda", (9, 0), "sm_90", 232448, 4)
SMALL = Tile(16, 32, 32, 4, 2)
BOTH = replace(SMALL, loads="both", programs=1, group_m=2)
TAIL = replace(BOTH, block_m=32, loads="weights", has_tail=True)
WEIGHTS = replace(SMALL, block_n=64, loads="weights")


# Blocks of 256 hold every row of the cases here; wide ones keep the interpreter's programs few.
UP, DOWN = Tile(1, 32, 256, 4, 1), Tile(1, 32, 256, 4, 1)
VARIANTS = {
    "fused-pointers": Variant("fused", SMALL, replace(SMALL, block_n=64)),
    "fused-weights": Variant("fused", WEIGHTS, WEIGHTS),
    "fused-both": Variant("fused", BOTH, replace(BOTH, is_flat=True)),
    "fused-tail": Variant("fused", TAIL, replace(TAIL, loads="both")),
    "decode": Variant("decode", UP, DOWN),
}
# All that a variant may meet goes to these two; the others share their kernels.
THOROUGH = ("fused-both", "decode")
MANY = (
    *("token-float32", "token-halves", "static-tensor", "none-float16", "none-bfloat16"),
    *("plain-gelu", "gpt-oss", "dead-ids", "mapped", "strided", "special-rows", "special-static"),
    *("on-input-token", "codes-token", "tensor-bfloat16"),
)
FEW = ("token-bfloat16", "static-bfloat16")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "facts_of", lambda device: HOPPER)
    # The interpreter has no assembly.
    monkeypatch.setattr(tiles, "packs_codes", lambda device, a_bytes: False)
    eager._layer_variant.cache_clear()


def run(case: Problem, variant: Variant | None = None) -> torch.Tensor:
    """Compute a case, by one variant if it takes it, else by the kernels that take every call."""
    call = ExpertsArguments(*case.args, **case.options)
    with variants.forced(variant or eager.apart_variant(call)):
        return eager.experts(call)


def is_taken(case: Problem, variant: Variant) -> bool:
    """Say whether a variant computes a case itself."""
    from int8moe_compile.lowerings import eager_variants

    call = ExpertsArguments(*case.args, **case.options)
    has = eager_variants.features_of(call)
    return variants.takes(variant, *eager.layer_products(call), HOPPER, has)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, name) for name in VARIANTS for case in FEW),
        *((case, name) for name in THOROUGH for case in MANY),
        # Several tiles of an expert.
        *(("more-rows", name) for name in ("fused-pointers", "fused-both", "fused-tail")),
    ],
)
def test_same_bits_as_the_tables_kernels(case: str, name: str) -> None:
    """Whatever a variant takes, it computes to the bit; what it does not take, they compute."""
    built = next(each for each in CASES if each.name == case).build()
    found = run(built, VARIANTS[name])
    if built.options.get("activation_quant") == "none":
        assert_close(found, built)
    else:
        assert torch.equal(found.nan_to_num(7.0), run(built).nan_to_num(7.0))


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("word", ["token", "static", "none"])
def test_one_token_decodes_by_its_own_tiles(K: int, word: str) -> None:
    """Also where a block of slots is not full."""
    case = with_scheme(problem(K, T=1, H=144, I=48, E=4, K=K), word)
    pair = eager.layer_products(ExpertsArguments(*case.args, **case.options))
    decode = variants.decode_variant(*pair)
    assert decode is not None and is_taken(case, decode)
    found = run(case, decode)
    if word == "none":
        assert_close(found, case)
    else:
        assert torch.equal(found, run(case))


def test_the_cases_are_taken() -> None:
    """Else the test above would compare the tables' kernels with themselves."""
    cases = {case.name: case.build() for case in CASES}
    never = {"on-input-token", "codes-token", "tensor-bfloat16"}
    undescribed = {"none-float16", "none-bfloat16", "plain-gelu", "strided"}
    for name, refused in (
        ("fused-both", never | undescribed),
        ("decode", never | {"plain-gelu", "strided"}),
    ):
        found = {case for case in MANY if not is_taken(cases[case], VARIANTS[name])}
        assert found == refused, name
    assert is_taken(cases["on-input-token"], VARIANTS["fused-pointers"])
    for name in VARIANTS:
        assert all(is_taken(cases[case], VARIANTS[name]) for case in FEW)


@triton.jit
def _encode_kernel(out_ptr, x_ptr, scale_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tile_math.encode(tl.load(x_ptr + at), tl.load(scale_ptr + at)))


def test_codes_by_reciprocal_are_the_quotients_codes() -> None:
    """Scales over all of fp32, subnormal ones too, values beside every half integer and far out."""
    draw = torch.Generator().manual_seed(0)
    count = 1 << 18
    scale = torch.rand(count, generator=draw) + 1.0
    # Twice, because a power below 2**-126 would be 0 on machines that flush subnormals.
    exponent = torch.randint(-149, 121, (count,), generator=draw)
    scale = torch.ldexp(torch.ldexp(scale, exponent // 2), exponent - exponent // 2)
    half = torch.randint(-140, 140, (count,), generator=draw).float() + 0.5
    x = half * scale
    for steps in range(-2, 3):
        target = torch.full((count,), float("inf") if steps > 0 else float("-inf"))
        near = x.clone()
        for _ in range(abs(steps)):
            near = torch.nextafter(near, target)
        _compare(near, scale)
    _compare(x.bfloat16().float(), scale)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e-45]
    )
    _compare(special.repeat(count // 8), scale)
    _compare(x, torch.full_like(x, float("inf")))
    _compare(x, torch.full_like(x, float("nan")))


def _compare(x: torch.Tensor, scale: torch.Tensor) -> None:
    found = torch.empty_like(x, dtype=torch.int8)
    with np.errstate(all="ignore"):
        _encode_kernel[(1,)](found, x, scale, len(x))
    expected = (x / scale).clamp(-128, 127).round().nan_to_num(0.0)
    assert torch.equal(found, expected.to(torch.int8))
    assert scale.isfinite().logical_not().any() or len(found.unique()) > 1


def test_rows_of_every_significand_and_maximum() -> None:
    """As on a GPU in test_lowerings_codes.py: one step left out would change 24 codes."""
    x = rows_of_every_significand(torch.bfloat16)
    host = eager_variants.EagerHost(ExpertsArguments(*problem().args))
    codes, scale, _ = variant_rows.codes(host, x, None)
    expected, expected_scale = quantize.quantize_activations(x, "token", None)
    assert torch.equal(codes, expected)
    assert torch.equal(scale.nan_to_num(7.0), expected_scale.flatten().nan_to_num(7.0))
