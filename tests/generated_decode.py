"""What Inductor generates for weight-only layers; collected in a process of its own only."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from generated import shapes
from inductor_source import generated_source
from support import EXPERTS


def tensor_cores(source: str) -> list[bool]:
    """Return which products of "decode" take words of floats, the first one's word first."""
    pattern = r"async_compile\.triton\('decode_(?:up|down)_kernel'.*?'TENSOR_CORES': (True|False)"
    return [word == "True" for word in re.findall(pattern, source, re.S)]


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("kind", ["view", "part of a concatenation"])
def test_words_of_floats_need_aligned_tokens(kind: str, offset: int) -> None:
    """bf16: a view that begins within an input, and a loop's result behind other columns."""

    def function(flat: torch.Tensor, *rest: torch.Tensor) -> Any:
        if kind == "view":
            return EXPERTS(flat.narrow(1, offset, 512), *rest, activation_quant="none")
        head, x = flat.narrow(1, 0, offset), flat.narrow(1, offset, 512).sin()
        joined = torch.cat([head, x], 1)
        return joined, EXPERTS(x, *rest, activation_quant="none")

    flat = ((1, 520), torch.bfloat16)
    source = generated_source(function, [flat, *shapes(1)[3:]], tokens=1)
    up, down = tensor_cores(source)
    assert down and up == (offset % 8 == 0)
