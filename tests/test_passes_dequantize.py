"""The marker that a graph keeps: Inductor's own code for it, and whole modules through Inductor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import hf_models
import pytest
import torch
from torch import Tensor
from torch._inductor import config

import int8moe_compile
from int8moe_compile.passes import notices
from int8moe_compile.passes.capture import capture_backend

DEQUANTIZE = torch.ops.int8moe.dequantize


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    notices.forget()
    torch.compiler.reset()
    with config.patch(joint_custom_pre_pass=None):
        yield
    torch.compiler.reset()


def weight(columns: int | None, trailing: bool) -> tuple[Tensor, Tensor]:
    """Draw codes [3,6,10] and scales of a number of columns."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (3, 6, 10), generator=generator, dtype=torch.int8)
    scale = torch.rand(3, columns or 6, generator=generator) / 100
    return codes, scale.unsqueeze(-1) if trailing else scale


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lowered_code_gives_eager_bits(dtype: torch.dtype) -> None:
    scales = [weight(columns, trailing) for columns in (None, 1, 2) for trailing in (False, True)]
    codes, scale = weight(2, trailing=False)
    scales += [(codes[0], scale[0]), (codes[None], scale[None])]  # [N,H] and [A,E,N,H]

    def function(*tensors: Tensor) -> list[Tensor]:
        results = []
        for codes, scale in zip(tensors[::2], tensors[1::2], strict=True):
            marked = DEQUANTIZE(codes, scale, dtype=dtype)
            # Fused, it would go on in fp32 unless the rounding is forced.
            results.extend((marked, marked.float() * 3.0))
        return results

    tensors = [tensor for pair in scales for tensor in pair]
    for got, wanted in zip(torch.compile(function)(*tensors), function(*tensors), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.slow
def test_no_call_of_the_operator_is_left_in_the_code() -> None:
    from torch._inductor.utils import run_and_get_code

    codes, scale = weight(None, trailing=False)
    compiled = torch.compile(lambda c, s: DEQUANTIZE(c, s, dtype=torch.float32) + 1.0)
    _, code = run_and_get_code(compiled, codes, scale)
    assert "int8moe.dequantize" not in "".join(code).replace("torch.ops.int8moe.dequantize]", "")


@pytest.mark.slow
def test_a_module_through_inductor_with_the_pass_and_without() -> None:
    experts = hf_models.build_experts(hf_models.experts_class("GptOssExperts"))
    experts = int8moe_compile.quantize_(experts)
    inputs = hf_models.routed()
    experts.config._experts_implementation = "int8moe"
    with torch.no_grad():
        int8 = experts(*inputs)
        experts.config._experts_implementation = "batched_mm"
        floats = experts(*inputs)
        with int8moe_compile.enabled():
            assert torch.equal(torch.compile(experts)(*inputs), int8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            without = torch.compile(experts)(*inputs)
    assert [str(w.message) for w in caught].count(notices.PASS_OFF) == 1
    assert not torch.equal(without, int8)
    # Inductor keeps fp32 inside a fused gate, eager rounds every step to bf16.
    assert (without.float() - floats.float()).norm() < 0.01 * floats.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False])
def test_exported_modules_warn_when_lowered_without_the_pass(on: bool) -> None:
    """AOTInductor lowers what Dynamo traced for no backend: only the lowering can tell."""
    experts = int8moe_compile.quantize_(
        hf_models.build_experts(hf_models.experts_class("MixtralExperts"))
    )
    exported = torch.export.export(experts, hf_models.routed())
    if on:
        int8moe_compile.enable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._inductor.aot_compile(exported.module(), hf_models.routed())
    assert [str(w.message) for w in caught].count(notices.PASS_OFF) == (0 if on else 1)


def test_capture_keeps_no_cache_and_no_setting() -> None:
    before = config.get_config_copy()
    torch.compile(lambda x: x + 1, backend=capture_backend(None))(torch.ones(2))
    assert config.get_config_copy() == before
