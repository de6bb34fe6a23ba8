"""The source that Inductor generates for variants; collected in a process of its own only."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from generated import COMBINE, COUNT, NORM_QUANTIZE, PLACE, block, shapes
from inductor_source import generated_source, launch_order

from int8moe_compile.lowerings import variants
from int8moe_compile.lowerings.tiles import Tile
from int8moe_compile.lowerings.variants import Variant

BOTH = Tile(128, 64, 128, 4, 3, 8, "both", 2)
NARROW = Tile(16, 64, 128, 4, 3)
FUSED = ["fused_up_kernel", "fused_down_kernel"]
DECODE = Variant("decode", Tile(1, 4, 512, 4, 1), Tile(1, 4, 256, 4, 1), False)
CASES = {
    "both": (Variant("fused", BOTH, BOTH, False), 64, [PLACE, "spread_kernel", *FUSED]),
    "apart": (
        Variant("fused", BOTH, BOTH, True),
        "T",
        [
            COUNT,
            PLACE,
            "spread_kernel",
            "fused_up_kernel",
            "requantize_kernel",
            "fused_down_kernel",
        ],
    ),
    "pointers": (
        Variant("fused", NARROW, replace(NARROW, loads="weights"), False),
        64,
        [PLACE, *FUSED],
    ),
    "decode": (DECODE, 2, ["decode_up_kernel", "decode_down_kernel"]),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_one_block(name: str) -> None:
    """The norm before and the residual after stay one kernel each."""
    variant, tokens, kernels = CASES[name]
    with variants.forced(variant):
        source = generated_source(block(), shapes(tokens), tokens=300)
    assert launch_order(source) == [NORM_QUANTIZE, *kernels, COMBINE]
    described = len(re.findall(r"TensorDescriptor\.from_tensor\(", source))
    assert described == {"both": 4, "apart": 4, "pointers": 1, "decode": 0}[name]
    code = "\n".join(line for line in source.splitlines() if not line.startswith("#"))
    assert "torch.ops.int8moe" not in code and "extern_kernels." not in code
