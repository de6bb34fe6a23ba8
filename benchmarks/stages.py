"""Time every kernel of an eager call apart, to see where a layer's time goes.

Kernels run in turn here; in a call of few tokens one starts before those ahead have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shapes import shape_named
from torch.profiler import ProfilerActivity, profile

import int8moe_compile  # noqa: F401
from int8moe_compile.lowerings import eager, eager_variants, variant_candidates, variants
from int8moe_compile.ops.arguments import ExpertsArguments


def problem(name: str, tokens: int) -> tuple[torch.Tensor, ...]:
    """Return random arguments of the operator for a shape of the table."""
    shape = shape_named(name)
    E, K, H, I = shape.experts, shape.top_k, shape.hidden, shape.intermediate  # noqa: E741
    device = "cuda"
    codes = {"dtype": torch.int8, "device": device}
    logits = torch.randn(tokens, E, device=device)
    weights, ids = torch.topk(torch.softmax(logits, -1), K)
    return (
        torch.randn(tokens, H, device=device, dtype=torch.bfloat16),
        torch.randint(-127, 128, (E, 2 * I, H), **codes),
        torch.rand(E, 2 * I, device=device) * 1e-3,
        torch.randint(-127, 128, (E, H, I), **codes),
        torch.rand(E, H, device=device) * 1e-3,
        weights.to(torch.bfloat16),
        ids,
    )


def forced(args: tuple[torch.Tensor, ...], label: str) -> AbstractContextManager[None]:
    """Return the context of the first variant whose label begins so; none for an empty one."""
    if not label:
        return contextlib.nullcontext()
    call = ExpertsArguments(*args)
    up, down = eager.layer_products(call)
    device = eager.facts_of(args[0].device)
    for variant in variant_candidates.candidates(
        up, down, device, eager_variants.features_of(call)
    ):
        if variants.label(variant).startswith(label):
            return variants.forced(variant)
    raise ValueError(f"--variant: wanted the beginning of a variant's label, got {label!r}")


def main() -> None:
    """Print median microseconds of each kernel, with L2 flushed before every call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["qwen3:1,16,64,256,1024,4096,16384"])
    parser.add_argument("--variant", default="", help="beginning of a variant's label")
    options = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for case in options.cases:
        name, _, counts = case.partition(":")
        for tokens in (int(count) for count in counts.split(",")):
            args = problem(name, tokens)
            with variants.in_turn(), forced(args, options.variant):
                for _ in range(2):
                    torch.ops.int8moe.experts(*args)
            with (
                variants.in_turn(),
                forced(args, options.variant),
                profile(activities=[ProfilerActivity.CUDA]) as recorded,
            ):
                for _ in range(8):
                    flush.zero_()
                    torch.ops.int8moe.experts(*args)
                torch.cuda.synchronize()
            times: dict[str, list[float]] = {}
            for event in recorded.events():
                if event.name.endswith("_kernel"):
                    times.setdefault(event.name, []).append(event.device_time)
            line = []
            for kernel, values in times.items():
                half = len(values) // 8
                for part in range(half):
                    median = sorted(values[part::half])[4]
                    line.append(f"{kernel[:-7]} {median:.1f}")
            print(f"{name} T={tokens}: {', '.join(line)}", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
