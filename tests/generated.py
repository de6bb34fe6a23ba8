"""The source that Inductor generates for CUDA; collected in a process of its own only.

Inductor and torch remember for good that there was a GPU, so test_lowerings_source.py starts this.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from inductor_source import Shape, generated_source, launch_order, pretend_cuda
from offline import INTEGER_INSTRUCTION, assembly, matrix_instructions, target_of
from support import EXPERTS
from torch._inductor.graph import GraphLowering
from triton.compiler import ASTSource

from int8moe_compile.lowerings import experts

BF16, INT8, FP32, INT64 = torch.bfloat16, torch.int8, torch.float32, torch.int64
experts.register()


def block(**options: Any) -> Callable[..., torch.Tensor]:
    """Return the second half of a transformer block: norm, experts, shared expert, residual."""

    def function(
        x: torch.Tensor,
        scale: torch.Tensor,
        shared: torch.Tensor,
        *rest: torch.Tensor,
    ) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = scale * wide.to(x.dtype)
        biases = {} if len(rest) == 6 else {"w13_bias": rest[6], "w2_bias": rest[7]}
        return x + (EXPERTS(y, *rest[:6], **biases, **options) + shared)

    return function


def shapes(T: int | str, K: int | str = 2, *, has_bias: bool = False) -> list[Shape]:
    """Return the shapes of a block's inputs: hidden 512, intermediate 256, 8 experts."""
    H, I, E = 512, 256, 8  # noqa: E741
    inputs: list[Shape] = [
        ((T, H), BF16),
        ((H,), BF16),
        ((T, H), BF16),
        ((E, 2 * I, H), INT8),
        ((E, 2 * I), FP32),
        ((E, H, I), INT8),
        ((E, H), FP32),
        ((T, K), BF16),
        ((T, K), INT64),
    ]
    if has_bias:
        inputs += [((E, 2 * I), BF16), ((E, H), BF16)]
    return inputs


NORM_QUANTIZE, REQUANTIZE = "triton_per_fused", "triton_per_fused"
COUNT, SCATTER, PLACE, PRODUCT, COMBINE = (
    "count_kernel",
    "scatter_kernel",
    "place_kernel",
    "triton_tem_fused",
    "triton_poi_fused",
)


@pytest.mark.parametrize(
    ("T", "options", "expected"),
    [
        (64, {}, [NORM_QUANTIZE, PLACE, PRODUCT, REQUANTIZE, PRODUCT, COMBINE]),
        ("T", {}, [NORM_QUANTIZE, COUNT, SCATTER, PRODUCT, REQUANTIZE, PRODUCT, COMBINE]),
        (8192, {}, [NORM_QUANTIZE, COUNT, SCATTER, PRODUCT, REQUANTIZE, PRODUCT, COMBINE]),
        # The norm alone; codes are converted in the tiles.
        (64, {"activation_quant": "none"}, ["triton_per_fused", PLACE, PRODUCT, PRODUCT, COMBINE]),
    ],
    ids=["64", "dynamic", "8192", "weight-only"],
)
def test_kernels_of_one_block(T: int | str, options: Any, expected: list[str]) -> None:
    """The kernels that take every call, as a device has them that no table was measured on."""
    source = generated_source(block(**options), shapes(T), tokens=300, arch="sm_80")
    assert launch_order(source) == expected


def test_static_scales_requantise_in_the_product() -> None:
    """With a given scale the second quantisation is the first product's epilogue."""

    def function(a13: torch.Tensor, a2: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        scales = {"a13_scale": a13, "a2_scale": a2}
        return block(activation_quant="static", **scales)(*rest)

    scale: Shape = ((1,), FP32)
    source = generated_source(function, [scale, scale, *shapes(64)], tokens=64)
    order = launch_order(source)
    assert order == [NORM_QUANTIZE, PLACE, "fused_up_kernel", "fused_down_kernel", COMBINE]
    source = generated_source(function, [scale, scale, *shapes(64)], tokens=64, arch="sm_80")
    assert launch_order(source) == [NORM_QUANTIZE, PLACE, PRODUCT, PRODUCT, COMBINE]


@pytest.mark.parametrize("word", ["token", "none"])
def test_nothing_synchronises_or_is_dequantised(word: str) -> None:
    source = generated_source(block(activation_quant=word), shapes("T"), tokens=300)
    code = "\n".join(line for line in source.splitlines() if not line.startswith("#"))
    for call in ("bincount", "histc", ".item()", "nonzero", "unique", "torch.ops.int8moe"):
        assert call not in code
    buffers = re.findall(r"empty_strided_cuda\(\((.*?)\), \(.*?\), torch\.(\w+)\)", code)
    assert len(buffers) >= 5
    for size, dtype in buffers:
        numbers = [int(number) for number in re.findall(r"\d+", size)]
        assert "float" not in dtype or math.prod(numbers) < 8 * 512 * 512, (size, dtype)


@pytest.mark.parametrize("T", [1, 64, "T"])
def test_no_input_counts_as_written(T: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor makes no CUDA graph of what writes to its inputs, and ids and map may be inputs."""
    written, generate = [], GraphLowering.codegen

    def codegen(self: GraphLowering) -> Any:
        code = generate(self)
        written.append(set(self.mutated_inputs))
        return code

    monkeypatch.setattr(GraphLowering, "codegen", codegen)

    def mapped(expert_map: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return block(expert_map=expert_map)(*rest)

    deep = shapes(T)
    deep[3:7] = [((8, 1024, 512), INT8), ((8, 1024), FP32), ((8, 512, 512), INT8), ((8, 512), FP32)]
    source = generated_source(block(), deep, tokens=300)
    # Whose operator writes five buffers, all of them the graph's own.
    assert ("int8moe._stream.default(" in source) == (T != 1)
    generated_source(block(), shapes(T), tokens=300)
    generated_source(mapped, [((16,), INT64), *shapes(T)], tokens=300)
    assert written == [set(), set(), set()]


def test_one_slot_leaves_no_row_unwritten() -> None:
    """With K = 1 the sum must not become the epilogue of a product that skips dead rows."""
    source = generated_source(block(), shapes(64, K=1), tokens=64)
    assert launch_order(source)[-1] == COMBINE


@pytest.mark.parametrize("T", [2048, "T"])
def test_a_norm_behind_the_sum_waits_for_what_it_reads_again(T: int | str) -> None:
    """Its second loop reads what other threads wrote in the first (pytorch/pytorch#190517)."""

    def function(x: torch.Tensor, scale: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        wide = (x + EXPERTS(x, *rest)).float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scale * wide.to(x.dtype)

    H, I, E = 2048, 256, 8  # noqa: E741
    weights = [((E, 2 * I, H), INT8), ((E, 2 * I), FP32), ((E, H, I), INT8), ((E, H), FP32)]
    inputs: list[Shape] = [((T, H), BF16), ((H,), BF16), *weights, ((T, 2), BF16), ((T, 2), INT64)]
    source = generated_source(function, inputs, tokens=2048)
    last = source[source.rindex("def triton_red_fused") :].partition("'''")[0]
    written = re.findall(r"tl\.store\((\w+)", last)[0]
    assert re.search(rf"tl\.load\({written}", last), "nothing is read again: test something else"
    between = last[last.index(f"tl.store({written}") : last.index(f"tl.load({written}")]
    assert between.count("tl.debug_barrier()") == 1
    assert "\n    tl.debug_barrier()" in between, "behind the loop"


def test_a_symbolic_number_of_slots_is_made_a_constant() -> None:
    """With dynamic=True every size of a graph's inputs is a symbol, K too."""
    source = generated_source(block(), shapes("T", K="K"), tokens=300, arch="sm_80")
    assert launch_order(source)[-2:] == [PRODUCT, COMBINE]


def test_no_tokens_launch_nothing_of_ours() -> None:
    source = generated_source(block(), shapes(0), tokens=64)
    assert PRODUCT not in launch_order(source)


def kernels_of(source: str, folder: Path) -> dict[str, Any]:
    """Load the kernels of a wrapper as Inductor's autotuner objects, by name."""
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None  # type: ignore[assignment]
    found = {}
    pattern = r"async_compile\.triton\('\w+', '''(.*?)''', device_str"
    for number, text in enumerate(re.findall(pattern, source, re.S)):
        path = folder / f"kernel_{number}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"generated_{number}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for value in vars(module).values():
            if type(value).__name__.endswith("Autotuner"):
                found[f"{value.fn.__name__}_{number}"] = value
    return found


def compile_generated(kernel: Any, arch: str) -> str:
    """Compile one generated kernel for an architecture, and return its assembly."""
    meta, config = kernel.triton_meta, kernel.configs[0]
    constants = dict(meta.get("constants", {}))
    constants |= {name: v for name, v in config.kwargs.items() if name in kernel.fn.arg_names}
    signature = dict(meta["signature"])
    for name in kernel.fn.arg_names:
        if name in constants or name not in signature:
            signature[name] = "constexpr"
    source = ASTSource(kernel.fn, signature, constants, meta["configs"][0])
    stages = 2 if arch.startswith("gfx") else config.num_stages
    options = {"num_warps": config.num_warps, "num_stages": stages}
    return assembly(triton.compile(source, target=target_of(arch), options=options))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_generated_products_use_the_integer_units(arch: str, tmp_path: Path) -> None:
    source = generated_source(
        block(alpha=1.702, beta=1.0, limit=7.0),
        shapes(4096, has_bias=True),
        tokens=4096,
        arch="sm_80",
    )
    with pretend_cuda():
        kernels = kernels_of(source, tmp_path)
        products = [kernel for name, kernel in kernels.items() if name.startswith(PRODUCT)]
        assert len(products) == 2
        for kernel in products:
            text = compile_generated(kernel, arch)
            assert re.search(INTEGER_INSTRUCTION[arch], text), matrix_instructions(text)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_generated_weight_only_products_pack_codes_on_cuda(arch: str, tmp_path: Path) -> None:
    source = generated_source(block(activation_quant="none"), shapes(64), tokens=64, arch=arch)
    with pretend_cuda():
        kernels = kernels_of(source, tmp_path)
        products = [kernel for name, kernel in kernels.items() if name.startswith(PRODUCT)]
        assert len(products) == 2
        for kernel in products:
            text = compile_generated(kernel, arch)
            assert ("fma.rn.bf16x2" in text) == (arch != "gfx942")


def test_generated_routing_and_norm_compile(tmp_path: Path) -> None:
    source = generated_source(block(), shapes("T"), tokens=300)
    with pretend_cuda():
        kernels = kernels_of(source, tmp_path)
        for routing in (COUNT, SCATTER):
            assert any(name.startswith(routing) for name in kernels)
        for name, kernel in kernels.items():
            # The approximate division of Triton's own "/" would flip codes.
            if name.startswith("triton_per_fused"):
                kernel.configs[0].kwargs.setdefault("XBLOCK", 1)
                assert "div.rn.f32" in compile_generated(kernel, "sm_90"), name
            elif not name.startswith(("triton_poi", PRODUCT)):
                compile_generated(kernel, "sm_90")
