"""List the kernels that one compiled Hugging Face decoder layer launches, bf16 beside INT8."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch._inductor.utils import run_and_get_code
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

import int8moe_compile

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 1024,
    "experts_implementation": "grouped_mm",
}


CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(num_experts=128, **SIZES),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        num_experts=60, shared_expert_intermediate_size=1408, **SIZES
    ),
}


def launches(source: str) -> list[str]:
    """Return the kernels and library calls of a wrapper, in order."""
    pattern = r"^\s+(?:(\w+)\.run\(|extern_kernels\.(\w+)\(|.*torch\.ops\.([\w.]+)\()"
    return [next(filter(None, found)) for found in re.findall(pattern, source, re.M)]


def main() -> None:
    """Print the launches of the layer before and after quantisation, and compare the outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--models", default=",".join(CONFIGS), help="some of the default ones")
    options = parser.parse_args()
    torch._inductor.config.triton.unique_kernel_names = True
    for config in (CONFIGS[name]() for name in options.models.split(",")):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
        ids = torch.randint(0, 1024, (1, options.tokens), device="cuda")
        for is_int8 in (False, True):
            torch._dynamo.reset()
            if is_int8:
                int8moe_compile.quantize_(model, scheme="w8a8")
                int8moe_compile.enable()
            with torch.inference_mode():
                eager = model(ids, use_cache=False).logits
                compiled = torch.compile(lambda x, m=model: m(x, use_cache=False).logits)
                out, sources = run_and_get_code(compiled, ids)
            error = (out - eager).float().norm() / eager.float().norm()
            print(f"== {config.model_type} {'int8' if is_int8 else 'bf16'}: error {error:.4f}")
            for source in sources:
                print("\n".join(launches(source)), flush=True)
        int8moe_compile.disable()


if __name__ == "__main__":
    main()
