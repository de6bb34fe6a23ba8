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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_demo_text_compiled_and_eager(dtype: torch.dtype) -> None:
    model = int8moe_compile.quantize_(demo.load().to(dtype))
    ids = torch.tensor([list(demo.PROMPT.encode())])
    eager, eager_logits = written(model, ids, None)
    config = CompileConfig(mode="default", fullgraph=True)
    config._compile_all_devices = True
    with int8moe_compile.enabled():
        counters.clear()
        compiled, logits = written(model, ids, config)
        compilations = counters["stats"]["unique_graphs"]
    print(f"{dtype}: {compilations} compilations; {bytes(compiled.tolist())!r}")
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
