"""Codes and floats of one another, exactly: instructions carried out here, and on a GPU."""

from __future__ import annotations

import inspect
import re
from fractions import Fraction

import pytest
import torch
from code_values import check_exponentials, converted, rows_of_every_significand
from support import problem

from int8moe_compile.lowerings import tile_math, tiles, variant_rows
from int8moe_compile.lowerings.eager_variants import EagerHost
from int8moe_compile.ops import quantize
from int8moe_compile.ops.arguments import ExpertsArguments
from int8moe_compile.oracle import DeviceFacts

WORD = 0xFFFFFFFF


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the two numbers of a register, the lower first, in fp64."""
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).double()


def register(values: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the register that holds two numbers, rounded once."""
    low, high = (int(v) & 0xFFFF for v in values.to(dtype).view(torch.int16).tolist())
    return low | high << 16


def permuted(low: int, high: int, selector: int) -> int:
    """Return prmt.b32: byte i is the one of eight that digit i of the selector names."""
    known = (low | high << 32).to_bytes(8, "little")
    digits = [selector >> 4 * i & 15 for i in range(4)]
    assert max(digits) < 8
    return int.from_bytes(bytes(known[digit] for digit in digits), "little")


def run(asm: str, word: int) -> list[int]:
    """Carry out the instructions of a block that reads $2 and writes $0 and $1."""
    registers = {"$2": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0) & WORD

    for line in re.findall(r"^\s*(\w[\w.]+ [^;]+);", asm, re.MULTILINE):
        name, _, rest = line.partition(" ")
        target, *operands = (part.strip() for part in rest.split(","))
        x = [value(operand) for operand in operands]
        dtype = torch.bfloat16 if name.endswith("bf16x2") else torch.float16
        floats = [halves(each, dtype) for each in x]
        if name == "xor.b32":
            registers[target] = x[0] ^ x[1]
        elif name == "mov.b32":
            registers[target] = x[0]
        elif name == "prmt.b32":
            registers[target] = permuted(*x)
        elif name == "sub.rn.f16x2":
            registers[target] = register(floats[0] - floats[1], dtype)
        else:
            assert name == "fma.rn.bf16x2", line
            registers[target] = register(floats[0] * floats[1] + floats[2], dtype)
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 1), (torch.bfloat16, 64)])
def test_the_packed_instructions_are_exact(dtype: torch.dtype, unit: int) -> None:
    source = inspect.getsource(tile_math.codes_to_float.fn)
    blocks = re.findall(r'asm="""(.*?)"""', source, re.DOTALL)
    asm = next(each for each in blocks if ("bf16x2" in each) == (dtype == torch.bfloat16))
    codes = torch.arange(-128, 128, dtype=torch.int8)
    for four in codes.view(64, 4):
        word = int.from_bytes(bytes(int(code) & 255 for code in four), "little")
        got = torch.cat([halves(each, dtype) for each in run(asm, word)])
        assert torch.equal(got * unit, four.double())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_on_the_gpu(dtype: torch.dtype) -> None:
    facts = DeviceFacts.of("cuda")
    expected = torch.arange(-128, 128, dtype=dtype)
    for is_packed in {False, tiles.packs_codes(facts, dtype.itemsize)}:
        assert torch.equal(converted(dtype, "cuda", is_packed=is_packed).cpu(), expected)


def test_where_codes_are_packed() -> None:
    def packs(arch: str, capability: tuple[int, int], a_bytes: int = 2) -> bool:
        return tiles.packs_codes(DeviceFacts("cuda", capability, arch), a_bytes)

    assert packs("sm_80", (8, 0)) and packs("sm_90", (9, 0)) and packs("sm_120", (12, 0))
    assert not packs("sm_75", (7, 5)) and not packs("gfx942", (9, 4))
    assert not packs("sm_90", (9, 0), 1) and not packs("sm_90", (9, 0), 4)
    assert not tiles.packs_codes(DeviceFacts("cpu"), 2)
    assert not tiles.packs_codes(DeviceFacts("cuda"), 2)


def rounded(value: Fraction) -> Fraction:
    """Return the fp32 number next to a value of usual magnitude, halves to even."""
    if value == 0:
        return value
    exponent = 0
    while abs(value) * Fraction(2) ** exponent >= 1 << 24:
        exponent -= 1
    while abs(value) * Fraction(2) ** exponent < 1 << 23:
        exponent += 1
    return Fraction(round(value * Fraction(2) ** exponent)) / Fraction(2) ** exponent


@pytest.mark.parametrize(("bits", "ties"), [(8, 255), (11, 2057)])
def test_one_step_gives_the_code_of_the_ieee_quotient(bits: int, ties: int) -> None:
    """For every significand of a value and of its row's maximum: encode_by_maximum is encode.

    A quotient is far from where codes change but for a few, which exact arithmetic goes through.
    From nine powers of two below the maximum on, codes are 0 or next to it by a wide margin.
    """
    significands = torch.arange(1 << (bits - 1), 1 << bits, dtype=torch.float64)
    found = 0
    for power in range(10):
        value, maximum = significands[:, None] * 2.0**-power, significands[None, :]
        quotient = 127 * value / maximum
        is_near = (quotient - quotient.floor() - 0.5).abs() < 2e-5
        is_near &= (value <= maximum) | (power > 0)
        for row, column in is_near.nonzero().tolist():
            found += 1
            x, amax = Fraction(float(value[row, 0])), Fraction(float(maximum[0, column]))
            scale = rounded(amax / 127)
            reciprocal = rounded(1 / scale)
            first = rounded(x * reciprocal)
            step = rounded(first + rounded(x - first * scale) * reciprocal)
            assert round(step) == round(rounded(x / scale)), (x, amax)
    assert found == ties


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_every_significand_and_maximum(dtype: torch.dtype) -> None:
    """Rows whose maximum is one of a binade, or far from 1, or not finite, hold all values."""
    x = rows_of_every_significand(dtype)
    host = EagerHost(ExpertsArguments(*problem().to("cuda").args))
    codes, scale, _ = variant_rows.codes(host, x.to("cuda"), None)
    expected, expected_scale = quantize.quantize_activations(x, "token", None)
    assert torch.equal(codes.cpu(), expected)
    assert torch.equal(scale.cpu().nan_to_num(7.0), expected_scale.flatten().nan_to_num(7.0))


@pytest.mark.gpu
def test_exp_keeps_to_two_units() -> None:
    check_exponentials("cuda")
