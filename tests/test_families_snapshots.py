"""What each structure of experts becomes: the graph behind the pass, as text.

A change that is meant is accepted by running this file with EXPECTTEST_ACCEPT=1, which rewrites
the texts below; read the difference before committing it.
"""

from __future__ import annotations

import textwrap

import hf_models
import torch
from expecttest import assert_expected_inline
from passes_support import run
from torch import fx

from int8moe_compile.quantization import quantize_

SHORT = {
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.int8: "i8",
    torch.int64: "i64",
}


# Every structure that transformers has, by the name that docs/families.md gives it, and a class.
STRUCTURES = {
    "silu": "Qwen3MoeExperts",
    "gelu_tanh": "Gemma4TextExperts",
    "silu_limited": "DeepseekV4Experts",
    "swiglu_oai": "MiniMaxM3VLExperts",
    "swiglu_oai_bias": "OpenAIPrivacyFilterExperts",
    "swiglu_oai_interleaved_bias": "GptOssExperts",
    "relu2_not_gated": "NemotronHExperts",
}


def described(argument: object) -> str:
    """Write a tensor as dtype and shape; sizes that are symbols in the order they appear."""
    tensor = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    if not isinstance(tensor, torch.Tensor):
        return str(argument)
    sizes = ", ".join(str(size) if isinstance(size, int) else "s" for size in tensor.shape)
    return f"{SHORT[tensor.dtype]}[{sizes}]"


def snapshot(structure: str, implementation: str) -> str:
    """Compile an experts module twice; return what is computed, without inputs and sizes."""
    experts = quantize_(hf_models.build_experts(hf_models.experts_class(STRUCTURES[structure])))
    experts.config._experts_implementation = implementation
    lines = []
    for dynamic in (False, True):
        lines.append("dynamic:" if dynamic else "static:")
        (graph,) = run(experts, *hf_models.routed(), dynamic=dynamic).graphs
        graph.graph.eliminate_dead_code()
        for node in graph.graph.nodes:
            if node.op == "call_function":
                lines += written(node)
    return "\n".join(lines)


def written(node: fx.Node) -> list[str]:
    """Write one call: its operands, then its options, the tensors among them by shape."""
    operands = ", ".join(described(argument) for argument in node.args)
    options = ", ".join(f"{name}={described(value)}" for name, value in node.kwargs.items())
    texts = (operands, options, f"-> {described(node)}")
    lines = [line for text in texts for line in textwrap.wrap(text, 90, break_long_words=False)]
    return [f"  {node.target}", *(f"    {line}" for line in lines)]


def test_silu_grouped_mm() -> None:
    assert_expected_inline(
        snapshot("silu", "grouped_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, gated=True
    -> bf16[s, 64]""",
    )


def test_silu_batched_mm() -> None:
    assert_expected_inline(
        snapshot("silu", "batched_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, gated=True
    -> bf16[s, 64]""",
    )


def test_gelu_tanh_grouped_mm() -> None:
    assert_expected_inline(
        snapshot("gelu_tanh", "grouped_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=gelu_tanh, alpha=1.0, beta=0.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=gelu_tanh, alpha=1.0, beta=0.0, gated=True
    -> bf16[s, 64]""",
    )


def test_gelu_tanh_batched_mm() -> None:
    assert_expected_inline(
        snapshot("gelu_tanh", "batched_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=gelu_tanh, alpha=1.0, beta=0.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=gelu_tanh, alpha=1.0, beta=0.0, gated=True
    -> bf16[s, 64]""",
    )


def test_silu_limited_grouped_mm() -> None:
    assert_expected_inline(
        snapshot("silu_limited", "grouped_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, limit=10.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, limit=10.0, gated=True
    -> bf16[s, 64]""",
    )


def test_silu_limited_batched_mm() -> None:
    assert_expected_inline(
        snapshot("silu_limited", "batched_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, limit=10.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=silu, alpha=1.0, beta=0.0, limit=10.0, gated=True
    -> bf16[s, 64]""",
    )


def test_swiglu_oai_grouped_mm() -> None:
    assert_expected_inline(
        snapshot("swiglu_oai", "grouped_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=silu, alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=silu, alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[s, 64]""",
    )


def test_swiglu_oai_batched_mm() -> None:
    assert_expected_inline(
        snapshot("swiglu_oai", "batched_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=silu, alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=silu, alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[s, 64]""",
    )


def test_swiglu_oai_bias_grouped_mm() -> None:
    assert_expected_inline(
        snapshot("swiglu_oai_bias", "grouped_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[s, 64]""",
    )


def test_swiglu_oai_bias_batched_mm() -> None:
    assert_expected_inline(
        snapshot("swiglu_oai_bias", "batched_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[s, 64]""",
    )


def test_swiglu_oai_interleaved_bias_grouped_mm() -> None:
    assert_expected_inline(
        snapshot("swiglu_oai_interleaved_bias", "grouped_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[s, 64]""",
    )


def test_swiglu_oai_interleaved_bias_batched_mm() -> None:
    assert_expected_inline(
        snapshot("swiglu_oai_interleaved_bias", "batched_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 96, 64], f32[8, 96], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, w13_bias=bf16[8, 96], w2_bias=bf16[8, 64], activation=silu,
    alpha=1.702, beta=1.0, limit=7.0, gated=True
    -> bf16[s, 64]""",
    )


def test_relu2_not_gated_grouped_mm() -> None:
    assert_expected_inline(
        snapshot("relu2_not_gated", "grouped_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 48, 64], f32[8, 48], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=relu2, alpha=1.0, beta=0.0, gated=False
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 48, 64], f32[8, 48], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=relu2, alpha=1.0, beta=0.0, gated=False
    -> bf16[s, 64]""",
    )


def test_relu2_not_gated_batched_mm() -> None:
    assert_expected_inline(
        snapshot("relu2_not_gated", "batched_mm"),
        """\
static:
  int8moe.experts.default
    bf16[7, 64], i8[8, 48, 64], f32[8, 48], i8[8, 64, 48], f32[8, 64], bf16[7, 2], i64[7, 2]
    activation_quant=token, activation=relu2, alpha=1.0, beta=0.0, gated=False
    -> bf16[7, 64]
dynamic:
  int8moe.experts.default
    bf16[s, 64], i8[8, 48, 64], f32[8, 48], i8[8, 64, 48], f32[8, 64], bf16[s, s], i64[s, s]
    activation_quant=token, activation=relu2, alpha=1.0, beta=0.0, gated=False
    -> bf16[s, 64]""",
    )
