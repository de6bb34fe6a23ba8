"""Time what compiling and calling cost on the host: torch.compile cold, and one eager call.

The compilation is that of one Qwen3-MoE decoder model with empty caches, bf16 and INT8 in
processes of their own, so that neither warms the other. An eager call repeats what the first of
its kind launched. That first one records it, which costs more than a call that neither records nor
repeats; both are printed, too.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def cold(scheme: str, layers: int, tokens: int, *, is_profiled: bool) -> float:
    """Return the seconds of the first call of a compiled model in this process."""
    from transformers import AutoModelForCausalLM
    from whole_model import SIZES, Qwen3MoeConfig

    import int8moe_compile

    config = Qwen3MoeConfig(num_hidden_layers=layers, **SIZES)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if scheme != "bf16":
        int8moe_compile.quantize_(model, scheme=scheme)
        int8moe_compile.enable()
    ids = torch.randint(0, 32768, (1, tokens), device="cuda")
    compiled = torch.compile(lambda x: model(x, use_cache=False).logits)
    profile = cProfile.Profile()
    with torch.inference_mode():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if is_profiled:
            profile.enable()
        compiled(ids)
        torch.cuda.synchronize()
        profile.disable()
        passed = time.perf_counter() - begin
    if is_profiled:
        pstats.Stats(profile).sort_stats("cumulative").print_stats("int8moe|lowerings|passes", 25)
    return passed


def eager_us(tokens: int, calls: int, *, is_first: bool = False) -> float:
    """Return the host's microseconds for one eager call, the GPU never waited for.

    is_first: of each call is none of its kind remembered.
    """
    from stages import problem

    from int8moe_compile.lowerings import prepared

    args = problem("qwen3", tokens)
    for _ in range(5):
        torch.ops.int8moe.experts(*args)
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            if is_first:
                prepared.forget()
            torch.ops.int8moe.experts(*args)
        best = min(best, (time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return 1e6 * best


def main() -> None:
    """Print both costs; with --child, compile one scheme and print its seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", default="bf16,w8a8")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="list the package's functions")
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    if options.child:
        passed = cold(options.child, options.layers, options.tokens, is_profiled=options.profile)
        print(f"SECONDS {passed:.2f}")
        return
    for turn in range(options.repeats):
        for scheme in options.schemes.split(","):
            command = [sys.executable, __file__, "--child", scheme]
            command += ["--layers", str(options.layers), "--tokens", str(options.tokens)]
            command += ["--profile"] if options.profile and turn == 0 else []
            with tempfile.TemporaryDirectory() as folder:
                caches = {CACHE: folder, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
                done = subprocess.run(command, env={**os.environ, **caches}, check=False)
            print(f"{scheme} turn {turn}: exit {done.returncode}", flush=True)
    from int8moe_compile.lowerings import prepared

    # So few calls that the launch queue (1024 deep) never fills and blocks the host.
    for tokens in (1, 16, 64, 1024, 4096):
        repeated, first = eager_us(tokens, 60), eager_us(tokens, 60, is_first=True)
        with prepared.plainly():
            plain = eager_us(tokens, 60)
        times = f"{repeated:.1f} us repeated, {first:.1f} first of its kind, {plain:.1f} neither"
        print(f"eager, {tokens} tokens, host: {times}", flush=True)


if __name__ == "__main__":
    main()
