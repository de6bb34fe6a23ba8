"""generate() on a GPU with mode="reduce-overhead": CUDA graphs, equal tokens, few compilations."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from generation import Compiler, generate
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

import int8moe_compile
from int8moe_compile.passes import installed
from int8moe_compile.quantization import quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

LENGTHS = (5, 1, 2, 50, 200, 17)


def on_gpu(family: str, implementation: str) -> Any:
    """Build a tiny quantised model in fp32, where no two tokens tie."""
    torch._dynamo.reset()
    counters.clear()
    model = quantize_(hf_models.build_model(family, dtype=torch.float32)).cuda()
    model.set_experts_implementation(implementation)
    return model


def compilations_in_float(family: str, ids: Tensor, new_tokens: int) -> int:
    """Count those of the float model for two calls. A sliding cache's Python counter costs one."""
    torch._dynamo.reset()
    counters.clear()
    model = hf_models.build_model(family, dtype=torch.float32).cuda()
    compiler = Compiler()
    for _ in range(2):
        generate(model, ids, new_tokens, compile_config=compiler.config)
    return int(counters["stats"]["unique_graphs"])


# transformers decodes "grouped_mm" by batched_mm on a GPU and leaves the other name alone.
@pytest.mark.parametrize("implementation", ["int8moe", "grouped_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiled_steps_write_what_eager_writes(family: str, implementation: str) -> None:
    model = on_gpu(family, "int8moe")
    ids = hf_models.token_ids(2, 9)
    ids[1, :4] = 0  # padded on the left
    ids = ids.cuda()
    wanted = generate(model, ids, 24)
    model.set_experts_implementation(implementation)
    config = CompileConfig(mode="reduce-overhead", fullgraph=True)
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, int8moe_compile.enabled():
        got = generate(model, ids, 24, compile_config=config)
        again = generate(model, ids, 24, compile_config=config)
        experts_pass = installed()
    assert torch.equal(got, wanted) and torch.equal(again, wanted)
    assert experts_pass is not None and experts_pass.outcomes
    assert all(outcome.backend == "triton" for outcome in experts_pass.outcomes)
    assert counters["inductor"]["cudagraph_skips"] == 0
    compilations = counters["stats"]["unique_graphs"]
    in_float = compilations_in_float(family, ids, 24)
    print(f"{family}: {compilations} compilations, {in_float} in float")
    assert compilations <= in_float <= 2


def test_few_compilations_for_every_prompt_length() -> None:
    model = on_gpu("qwen3_moe", "int8moe")
    config = CompileConfig(mode="reduce-overhead", fullgraph=True)
    with int8moe_compile.enabled():
        for length in LENGTHS:
            ids = hf_models.token_ids(1, length).cuda()
            got = generate(model, ids, 4, compile_config=config)
            assert torch.equal(got, generate(model, ids, 4))
    compilations = counters["stats"]["unique_graphs"]
    print(f"prompt lengths {LENGTHS}: {compilations} compilations")
    assert compilations <= 3
