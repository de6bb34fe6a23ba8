"""Generate with a Hugging Face model, bf16 beside INT8, both compiled, with a static cache.

Eight layers of the Qwen3-30B-A3B shape with random weights: tokens per second at several batch
sizes, time to the first token of a long prompt, peak memory, seconds to compile.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, StaticCache

import int8moe_compile

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
    "experts_implementation": "grouped_mm",
}
PROMPT = 32


def build(layers: int, scheme: str) -> Any:
    """Return the model on the GPU, quantised unless the scheme is bf16."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(num_hidden_layers=layers, **SIZES)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if scheme != "bf16":
        int8moe_compile.quantize_(model, scheme=scheme)
        int8moe_compile.enable()
    return model


def seconds(run: Any, repeats: int) -> float:
    """Return the median time of a call, the GPU idle before and after."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def decode_rate(model: Any, batch: int, new: int, repeats: int) -> tuple[float, float]:
    """Return tokens per second of generate(), and the seconds of its first call.

    generate() compiles the decoding step by itself where the cache is static.
    """
    # Else the second batch size would make the first one's graph one for every size.
    torch._dynamo.reset()
    ids = torch.randint(0, 32768, (batch, PROMPT), device="cuda")
    options = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0}

    def run(count: int) -> Any:
        return model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)

    first = seconds(lambda: run(8), 1)
    run(new)
    # Two lengths, so that prefill and fixed costs cancel.
    short, long = (seconds(lambda n=n: run(n), repeats) for n in (8, new))
    return batch * (new - 8) / (long - short), first


def time_to_first(model: Any, tokens: int, repeats: int) -> float:
    """Return milliseconds of a compiled prefill of one prompt into a static cache."""
    ids = torch.randint(0, 32768, (1, tokens), device="cuda")
    cache = StaticCache(config=model.config, max_cache_len=tokens + 8)

    positions = torch.arange(tokens, device="cuda")[None]

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x, past_key_values=cache, position_ids=positions, logits_to_keep=1)
        return out.logits.argmax(-1)

    compiled = torch.compile(step)

    def run() -> None:
        cache.reset()
        compiled(ids)

    for _ in range(3):
        run()
    return 1e3 * seconds(run, repeats)


def measure(options: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """Return one column of the table."""
    torch._dynamo.reset()
    model = build(options.layers, scheme)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"scheme": scheme}
    gc.collect()
    torch.cuda.empty_cache()
    found["weights GB"] = torch.cuda.memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        for batch in (int(size) for size in options.batches.split(",")):
            rate, first = decode_rate(model, batch, options.new, options.repeats)
            found[f"tokens/s, batch {batch}"] = rate
            found[f"first call s, batch {batch}"] = first
            print(f"{scheme} batch {batch}: {rate:.0f} tokens/s, {first:.0f} s", flush=True)
        found[f"ms to first token, {options.prompt}"] = time_to_first(
            model, options.prompt, options.repeats
        )
    found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    int8moe_compile.disable()
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> None:
    """Measure every scheme, print the table with ratios to bf16, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--schemes", default="bf16,w8a8")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--new", type=int, default=72)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default="whole_model.json")
    options = parser.parse_args()
    columns = [measure(options, scheme) for scheme in options.schemes.split(",")]
    Path(options.output).write_text(json.dumps(columns, indent=1))
    print(f"{'':>28}" + "".join(f"{column['scheme']:>12}{'ratio':>8}" for column in columns))
    for key in columns[0]:
        if key == "scheme":
            continue
        cells = "".join(f"{c[key]:12.2f}{c[key] / columns[0][key]:8.2f}" for c in columns)
        print(f"{key:>28}{cells}")


if __name__ == "__main__":
    main()
