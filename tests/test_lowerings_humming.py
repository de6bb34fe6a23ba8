"""humming as a backend, without it and without a GPU: refusals, conversion, cache, whole layer."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fake_humming
import offline
import own_process
import pytest
import torch
from support import Problem, problem, with_scheme
from torch import Tensor
from torch._subclasses import FakeTensorMode

import int8moe_compile
from int8moe_compile import registry
from int8moe_compile.lowerings import humming_weights
from int8moe_compile.lowerings.humming_weights import (
    ProductSizes,
    convert_codes,
    converted_weight,
    split_scale,
)
from int8moe_compile.ops import register
from int8moe_compile.ops.arguments import ExpertsArguments

HUMMING = torch.ops.int8moe.humming_experts
BF16 = torch.bfloat16


def test_the_layer_in_the_interpreter() -> None:
    own_process.run("interpreted_humming.py", TRITON_INTERPRET="1")


def test_pretended_graphs() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    own_process.run("pretended_humming.py", **hidden)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile(arch: str) -> None:
    from int8moe_compile.lowerings import humming as layer
    from int8moe_compile.lowerings import humming_kernels

    def multiply(*given: Any) -> Tensor:
        rows, outputs, top_k, dtype = given[1], *given[4:]
        return torch.empty(rows.values.shape[0] * top_k, outputs, dtype=dtype)

    names = [name for name in vars(humming_kernels) if name.endswith("_kernel")]
    with (
        fake_humming.installed(block_m=40),
        mock.patch.object(layer, "multiply", multiply),
        offline._recording(offline.facts_of(arch)) as log,
        contextlib.ExitStack() as stack,
    ):
        for name in names:
            recorder = offline._Recorder(getattr(humming_kernels, name), log)
            stack.enter_context(mock.patch.object(humming_kernels, name, recorder))
        case = problem(1, T=70, H=1040, I=1040, limit=7.0)
        layer.experts(ExpertsArguments(*case.args, **case.options))
    mine = [launch for launch in log if launch.kernel.__name__ in names]
    assert [launch.kernel.__name__ for launch in mine] == [
        "lists_kernel",
        "gate_kernel",
        "lists_kernel",
        "sum_kernel",
    ]
    for launch in mine:
        assert offline.assembly(offline.compile_launch(launch, arch))


def test_the_schema_is_that_of_experts() -> None:
    mine, theirs = HUMMING.default._schema, torch.ops.int8moe.experts.default._schema
    assert str(mine).replace("humming_experts", "experts") == str(theirs)
    assert torch.Tag.cudagraph_unsafe in HUMMING.default.tags


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation_quant": ({"word": "none"}, r"activation_quant: wanted 'token' .*got 'none'"),
    "static": ({"word": "static"}, r"activation_quant: wanted 'token' .*got 'static'"),
    "w13_scale": ({"granularity": "tensor"}, r"w13_scale: wanted .*\[4, 64\].*got \[4, 1\]"),
    "halves": ({"granularity": "halves"}, r"w13_scale: wanted .*\[4, 64\].*got \[4, 2\]"),
    "w13_bias": ({"w13_bias": torch.ones(4, 64)}, r"w13_bias: wanted None .*\[4, 64\]"),
    "w2_bias": ({"w2_bias": torch.ones(4, 64)}, r"w2_bias: wanted None .*\[4, 64\]"),
    "gated": ({"gated": False}, r"gated: wanted True .*got False"),
    "activation": ({"activation": "gelu"}, r"activation: wanted 'silu' .*got 'gelu'"),
    "out_dtype": ({"out_dtype": torch.float32}, r"out_dtype: wanted .*got torch.float32"),
    "hidden_states": ({"dtype": torch.float32}, r"out_dtype: wanted .*got torch.float32"),
    "hidden": ({"H": 72}, r"w13: wanted rows of a multiple of 16 .*\[4, 64, 72\]"),
    "intermediate": ({"I": 40}, r"w2: wanted rows of a multiple of 16 .*\[4, 64, 40\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_fake_and_the_kernel_refuse_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    changes = dict(changes)
    word, granularity = changes.pop("word", "token"), changes.pop("granularity", "channel")
    case = with_scheme(problem(1, **changes), word, granularity)
    with pytest.raises(ValueError, match=message):
        HUMMING(*case.args, **case.options)
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        HUMMING(*on_fake_cuda(case), **fake_options(case))


def on_fake_cuda(case: Problem) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in case.args]


def fake_options(case: Problem) -> dict[str, Any]:
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="cuda")
        if isinstance(value, Tensor)
        else value
        for name, value in case.options.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fake_describes_the_result(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        out = HUMMING(*on_fake_cuda(problem(1, T=7, dtype=dtype)), limit=7.0, alpha=1.702)
    assert (out.shape, out.dtype, out.device.type) == ((7, 64), dtype, "cuda")


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_states: wanted a CUDA tensor with humming, got c"):
        HUMMING(*problem(1).args)


@pytest.mark.skipif(importlib.util.find_spec("humming") is not None, reason="humming is here")
def test_what_is_missing_is_named() -> None:
    with (
        mock.patch.object(register, "check_humming"),
        pytest.raises(ImportError, match=r'pip install "int8moe_compile\[humming\]"'),
    ):
        HUMMING(*problem(1).args)


@pytest.mark.parametrize("grad", [False, True])
def test_the_kernel_meets_the_callers_own_weights(grad: bool) -> None:
    """A copy or a wrapper would be converted at every call."""
    met: list[Any] = []

    def kernel(call: Any) -> Tensor:
        met.append(call)
        return call.hidden_states.clone()

    case = problem(1)
    w13 = torch.nn.Parameter(case.w13, requires_grad=False)
    x = case.hidden_states.requires_grad_(grad)
    with (
        mock.patch.object(register, "check_humming"),
        mock.patch.object(registry, "humming_kernel", lambda: kernel),
    ):
        out = HUMMING(x, w13, *case.args[2:])
    assert met[0].w13 is w13 and met[0].w2 is case.w2
    assert out.requires_grad is grad
    if grad:
        with pytest.raises(NotImplementedError, match="no backward"):
            out.sum().backward()


def test_enable_decides_which_operator_runs_eagerly() -> None:
    import hf_models
    from test_hf_experts import names_called

    experts = hf_models.build_experts(
        hf_models.experts_class("MixtralExperts"), implementation="int8moe"
    )
    int8moe_compile.quantize_(experts)
    inputs = hf_models.routed()
    with torch.no_grad():
        assert names_called(experts, *inputs) == ["experts"]
        with int8moe_compile.enabled("humming"), pytest.raises(ValueError, match="with humming"):
            experts(*inputs)
        assert names_called(experts, *inputs) == ["experts"]


def test_split_scales_multiply_to_the_scales() -> None:
    scale = torch.rand(5, 64, generator=torch.Generator().manual_seed(1)) / 100
    scale[1], scale[2, 3:], scale[3] = 0.25, 1e-30, 0.0
    power, rest = split_scale(scale)
    mantissa, _ = torch.frexp(power)
    assert torch.equal(mantissa, torch.full((5,), 0.5))
    assert torch.equal(power[:, None] * rest, scale)
    assert bool((rest[:3].amax(1) >= 0.5).all()) and bool((rest <= 1).all())


@pytest.mark.parametrize("shape", [(3, 96, 48), (2, 128, 64), (5, 64, 256)])
@pytest.mark.parametrize("step", [1, 2 * 96 * 48, 1 << 28])
def test_conversion_keeps_every_code(shape: tuple[int, int, int], step: int) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).repeat(shape[0] * shape[1] * shape[2] // 256 + 1)
    codes = codes[: torch.Size(shape).numel()].reshape(shape)
    sizes = ProductSizes(shape[1], shape[2], shape[0], BF16)
    with fake_humming.installed() as fake, mock.patch.object(humming_weights, "STEP_CODES", step):
        tensors = convert_codes(codes, torch.arange(shape[0]).float(), sizes.config)
        assert torch.equal(fake.signed(tensors["weight"], sizes.config(shape[0])), codes)
    assert torch.equal(tensors["weight_scale"], torch.arange(shape[0]).float())
    assert fake.conversions == -(-shape[0] // max(1, step // (shape[1] * shape[2])))


@pytest.fixture
def humming() -> Iterator[fake_humming.Humming]:
    with fake_humming.installed() as fake:
        yield fake


def weight_and_scale() -> tuple[Tensor, Tensor]:
    case = problem(2)
    return case.w13, case.w13_scale


def test_a_weight_is_converted_once(humming: fake_humming.Humming) -> None:
    codes, scale = weight_and_scale()
    first = converted_weight("w13", codes, scale, BF16)
    assert converted_weight("w13", codes, scale, BF16) is first
    with torch.inference_mode():
        assert converted_weight("w13", codes, scale, BF16) is first
    assert humming.conversions == 1


def _write(codes: Tensor, scale: Tensor) -> None:
    codes[0, 0, 0] ^= 1


def _scale(codes: Tensor, scale: Tensor) -> None:
    scale.mul_(2)


def _swap(codes: Tensor, scale: Tensor) -> None:
    codes.data = codes.data.clone() ^ 1


def _set(codes: Tensor, scale: Tensor) -> None:
    codes.set_(codes.clone() ^ 1)  # type: ignore[call-overload]


@pytest.mark.parametrize("change", [_write, _scale, _swap, _set])
def test_a_change_is_seen(humming: fake_humming.Humming, change: Any) -> None:
    codes, scale = weight_and_scale()
    before = converted_weight("w13", codes, scale, BF16)
    change(codes, scale)
    after = converted_weight("w13", codes, scale, BF16)
    assert humming.conversions == 2
    power, rest = split_scale(scale)
    assert torch.equal(after.expert_scale, power) and torch.equal(after.channel_scale, rest)
    config = ProductSizes(*codes.shape[1:], codes.shape[0], BF16).config(codes.shape[0])
    assert torch.equal(humming.signed(after.codes, config), codes)
    assert torch.equal(before.codes, after.codes) is (change is _scale)


def test_memory_goes_with_the_weight(humming: fake_humming.Humming) -> None:
    codes, scale = weight_and_scale()
    count = len(humming_weights._converted)
    converted = weakref.ref(converted_weight("w13", codes, scale, BF16).codes)
    assert len(humming_weights._converted) == count + 1 and converted() is not None
    del codes
    gc.collect()
    assert len(humming_weights._converted) == count and converted() is None


def test_weights_whose_writes_are_not_counted_are_refused(humming: fake_humming.Humming) -> None:
    with torch.inference_mode():
        codes, scale = weight_and_scale()
    with pytest.raises(ValueError, match="w13: wanted a tensor whose writes torch counts"):
        converted_weight("w13", codes, scale, BF16)


def test_nothing_is_converted_or_compiled_while_a_graph_is_recorded(
    humming: fake_humming.Humming,
) -> None:
    codes, scale = weight_and_scale()
    other = codes.clone()
    known = converted_weight("w13", codes, scale, BF16)
    sizes = ProductSizes(64, 64, 4, BF16)
    product = humming_weights.product_of(sizes, 10, 0)
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.is_current_stream_capturing", lambda: True),
    ):
        assert converted_weight("w13", codes, scale, BF16) is known
        assert humming_weights.product_of(sizes, 10, 0) is product
        with pytest.raises(RuntimeError, match="a conversion of w2, which a CUDA graph cannot"):
            converted_weight("w2", other, scale, BF16)
        with pytest.raises(RuntimeError, match="to compile a product, which a CUDA graph cannot"):
            humming_weights.product_of(sizes, 11, 0)


def test_a_product_is_described_and_compiled(humming: fake_humming.Humming) -> None:
    product = humming_weights.product_of(ProductSizes(96, 64, 3, torch.float16), 12, 0)
    ((config, compute, tuning),) = humming.compiled
    assert (config.outputs, config.columns, config.num_experts) == (96, 64, 3)
    assert (config.shape_n, config.shape_k) == (128, 128)
    kinds = (config.a_dtype, config.b_dtype, config.c_dtype, config.as_dtype)
    assert kinds == ("int8", "int8", "float16", "float32")
    assert config.weight_scale_type == "tensor"
    assert compute == {"gemm_type": "indexed", "use_batch_invariant": True}
    assert tuning[0][:2] == (0, 1 << 30)
    assert product.block_m == tuning[0][2]["block_shape"][0]
    assert product.launch.tolist() == [0, 1 << 30, 0, 0]
