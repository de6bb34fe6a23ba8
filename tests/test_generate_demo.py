"""The shipped model writes the same 200 tokens compiled by Inductor as eager, ties aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import int8moe_compile
from int8moe_compile import demo

NEW_TOKENS = 200


def written(model: Any, ids: torch.Tensor, config: CompileConfig | None) -> Any:
    """Generate greedily; return the new tokens and the logits of each."""
    with torch.inference_mode():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            cache_implementation="static",
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=config is None,
            compile_config=config,
        )
    return result.sequences[0, ids.shape[1] :], torch.stack(result.logits)[:, 0].float()


CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("device", "mode"),
    [
        pytest.param("cpu", "default", marks=pytest.mark.slow),
        pytest.param("cuda", "reduce-overhead", marks=CUDA),
    ],
)
def test_demo_text_compiled_and_eager(device: str, mode: str, dtype: torch.dtype) -> None:
    model = int8moe_compile.quantize_(demo.load(device).to(dtype))
    ids = torch.tensor([list(demo.PROMPT.encode())], device=device)
    eager, eager_logits = written(model, ids, None)
    config = CompileConfig(mode=mode, fullgraph=True)
    config._compile_all_devices = True
    torch._dynamo.reset()
    with int8moe_compile.enabled():
        counters.clear()
        compiled, logits = written(model, ids, config)
        compilations = counters["stats"]["unique_graphs"]
    assert counters["inductor"]["cudagraph_skips"] == 0
    print(f"{device} {mode} {dtype}: {compilations} compilations; {bytes(compiled.tolist())!r}")
    assert compilations == 1
    differing = (eager != compiled).nonzero().flatten()
    if dtype == torch.float32:
        assert differing.numel() == 0
    elif differing.numel():
        first = int(differing[0])
        best, second = eager_logits[first].topk(2).values
        error = (eager_logits[: first + 1] - logits[: first + 1]).abs().max()
        print(f"same up to token {first}: margin {best - second:.4f}, difference {error:.4f}")
        assert best - second <= 2 * error
