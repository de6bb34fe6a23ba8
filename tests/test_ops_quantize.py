"""Hold the quantisers and the marker operator to their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from support import DEQUANTIZE

from int8moe_compile.ops import quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channel_codes_by_hand(dtype: torch.dtype) -> None:
    # rows of amax 127 (scale 1: half to even), 254 (scale 2), 0 (scale 1)
    weight = torch.tensor([[[127, 0.5, -1.5], [-254, 1, 3], [0, 0, 0]]], dtype=dtype)
    codes, scale = quantize.quantize_weight(weight)
    assert scale.tolist() == [[1.0, 2.0, 1.0]] and scale.dtype == torch.float32
    assert codes.tolist() == [[[127, 0, -2], [-127, 0, 2], [0, 0, 0]]]
    assert codes.dtype == torch.int8


def test_tensor_and_halves_by_hand() -> None:
    weight = torch.tensor([[[127.0], [1.0], [254.0], [-508.0]], [[0.0], [0.0], [0.0], [127.0]]])
    codes, scale = quantize.quantize_weight(weight, "tensor")
    assert scale.tolist() == [[4.0], [1.0]]
    assert codes.flatten(1).tolist() == [[32, 0, 64, -127], [0, 0, 0, 127]]
    codes, scale = quantize.quantize_weight(weight, "halves")
    assert scale.tolist() == [[1.0, 4.0], [1.0, 1.0]]
    assert codes.flatten(1).tolist() == [[127, 1, 64, -127], [0, 0, 0, 127]]


@pytest.mark.parametrize("granularity", ["channel", "tensor", "halves"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_come_from_ieee_fp32_divisions(dtype: torch.dtype, granularity: str) -> None:
    g = torch.Generator().manual_seed(0)
    weight = (torch.randn(3, 8, 4096, generator=g) * 0.02).to(dtype)
    codes, scale = quantize.quantize_weight(weight, granularity)
    spread = quantize.row_scale(scale, 8)[..., None]
    exact = weight.double() / spread.double()
    # fp64 holds an fp32 quotient before its rounding; rounding it to fp32 is the IEEE division
    assert torch.equal(codes.double(), torch.round(exact.float()).double())
    assert codes.abs().amax() == 127
    # half a step, and the rounding of quotients up to 127: 127 * 2**-24 of a step
    error = (codes.double() * spread.double() - weight.double()).abs()
    assert (error <= spread.double() * (0.5 + 127 * 2**-24)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 6])
def test_dequantize_multiplies_in_fp32_and_rounds_once(columns: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (3, 6, 5), dtype=torch.int8, generator=g)
    scale = torch.rand(3, columns, generator=g)
    spread = scale.repeat_interleave(6 // columns, dim=1)
    wanted = (codes.double() * spread.double()[..., None]).float().to(dtype)
    for given in (scale, scale[..., None]):
        out = DEQUANTIZE(codes, given, dtype=dtype)
        assert out.dtype == dtype and torch.equal(out, wanted)
    turned = DEQUANTIZE(codes.transpose(1, 2).contiguous().transpose(1, 2), scale, dtype=dtype)
    assert turned.is_contiguous() and torch.equal(turned, wanted)


def test_dequantize_takes_matrices_and_empty_stacks() -> None:
    codes = torch.tensor([[2, 3], [4, -5]], dtype=torch.int8)
    for scale in (torch.tensor([2.0, 0.5]), torch.tensor([[2.0], [0.5]])):
        out = DEQUANTIZE(codes, scale, dtype=torch.float32)
        assert out.tolist() == [[4.0, 6.0], [2.0, -2.5]]
    one = DEQUANTIZE(codes, torch.tensor([2.0]), dtype=torch.float16, activation_quant="none")
    assert one.tolist() == [[4.0, 6.0], [8.0, -10.0]]
    empty = DEQUANTIZE(codes.new_empty(0, 4, 3), torch.empty(0, 4), dtype=torch.bfloat16)
    assert empty.shape == (0, 4, 3)


def test_dequantize_result_is_fresh_and_the_scheme_only_rides_along() -> None:
    codes = torch.tensor([[[2, 3]]], dtype=torch.int8)
    scale = torch.ones(1, 1)
    plain = DEQUANTIZE(codes, scale, dtype=torch.float32)
    static = DEQUANTIZE(
        codes, scale, dtype=torch.float32, activation_quant="static", a_scale=torch.tensor(9.0)
    )
    assert torch.equal(plain, static)
    plain.zero_()
    assert codes.tolist() == [[[2, 3]]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(2, 4, 4)
    weight[1, 2, 3] = value
    for granularity in ("channel", "tensor", "halves"):
        with pytest.raises(ValueError, match="weight: wanted finite"):
            quantize.quantize_weight(weight, granularity)


def test_wrong_words_and_odd_halves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"granularity: wanted .* got 'group'"):
        quantize.quantize_weight(torch.ones(1, 2, 2), "group")
    with pytest.raises(ValueError, match="weight: wanted an even number of rows"):
        quantize.quantize_weight(torch.ones(1, 3, 2), "halves")


def test_no_rows_have_a_scale_too() -> None:
    for word in ("token", "tensor"):
        codes, scale = quantize.quantize_activations(torch.empty(0, 4), word)
        assert codes.shape == (0, 4) and scale.shape == ((0, 1) if word == "token" else (1, 1))
