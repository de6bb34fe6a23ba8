"""Snapshots of rewritten graphs, one a structure. EXPECTTEST_ACCEPT=1 renews them."""

from __future__ import annotations

import expecttest
import hf_models
from passes_support import run

from int8moe_compile.passes.canonical import Canon, text, value
from int8moe_compile.quantization import quantize_


def rewritten(name: str, scheme: str = "w8a8") -> str:
    """Return the graph of one experts module, inputs written as dtype and shape."""
    kind = hf_models.experts_class(name)
    inputs = hf_models.routed()
    calibration = [inputs] if scheme == "w8a8_static" else None
    experts = quantize_(hf_models.build_experts(kind), scheme, calibration=calibration)
    (graph,) = (module.graph for module in run(experts, *inputs).graphs)
    leaves = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            tensor = value(node)
            dtype, shape = (
                str(tensor.dtype).removeprefix("torch."),
                "x".join(map(str, tensor.shape)),
            )
            leaves[node] = f"{dtype}[{shape}]"
    (result,) = next(iter(reversed(graph.nodes))).args[0]
    return text(result, leaves, Canon(graph)).replace(", ", ",\n    ")


class Snapshots(expecttest.TestCase):
    def test_default(self) -> None:
        self.assertExpectedInline(
            rewritten("Qwen3MoeExperts"),
            """\
%0 = int8moe.experts.default(bfloat16[7x64],
    int8[8x96x64],
    float32[8x96],
    int8[8x64x48],
    float32[8x64],
    bfloat16[7x2],
    int64[7x2],
    token,
    None,
    None,
    None,
    None,
    silu,
    1,
    0,
    None,
    True,
    None,
    False,
    None)""",
        )

    def test_clamped(self) -> None:
        self.assertExpectedInline(
            rewritten("DeepseekV4Experts"),
            """\
%0 = int8moe.experts.default(bfloat16[7x64],
    int8[8x96x64],
    float32[8x96],
    int8[8x64x48],
    float32[8x64],
    bfloat16[7x2],
    int64[7x2],
    token,
    None,
    None,
    None,
    None,
    silu,
    1,
    0,
    10,
    True,
    None,
    False,
    None)""",
        )

    def test_gpt_oss(self) -> None:
        self.assertExpectedInline(
            rewritten("GptOssExperts"),
            """\
%0 = int8moe.experts.default(bfloat16[7x64],
    int8[8x96x64],
    float32[8x96],
    int8[8x64x48],
    float32[8x64],
    bfloat16[7x2],
    int64[7x2],
    token,
    None,
    None,
    bfloat16[8x96],
    bfloat16[8x64],
    silu,
    1.702,
    1,
    7,
    True,
    None,
    False,
    None)""",
        )

    def test_not_gated(self) -> None:
        self.assertExpectedInline(
            rewritten("NemotronHExperts"),
            """\
%0 = int8moe.experts.default(bfloat16[7x64],
    int8[8x48x64],
    float32[8x48],
    int8[8x64x48],
    float32[8x64],
    bfloat16[7x2],
    int64[7x2],
    token,
    None,
    None,
    None,
    None,
    relu2,
    1,
    0,
    None,
    False,
    None,
    False,
    None)""",
        )

    def test_static_scales(self) -> None:
        self.assertExpectedInline(
            rewritten("Qwen3MoeExperts", "w8a8_static"),
            """\
%0 = int8moe.experts.default(bfloat16[7x64],
    int8[8x96x64],
    float32[8x96],
    int8[8x64x48],
    float32[8x64],
    bfloat16[7x2],
    int64[7x2],
    static,
    float32[1],
    float32[1],
    None,
    None,
    silu,
    1,
    0,
    None,
    True,
    None,
    False,
    None)""",
        )
