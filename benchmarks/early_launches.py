"""Compare whole layers with and without launches that come before the kernel ahead has ended.

Eager calls in CUDA graphs, cold L2, routing drawn anew before each replay, contestants interleaved:
"in turn" is every kernel after the ones ahead, "early N" with N lines of each row of weights that
products fetch while they wait (AHEAD_LINES of variants.py). Both products in one launch fetch none:
where the tables choose that, all "early" are one contestant.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import peers
import torch
from bench_experts import Captured, draw, measure
from shapes import shape_named

from int8moe_compile.lowerings import eager, prepared, variants

LINES = (0, 2, 4, 8)


def setting(lines: int | None) -> AbstractContextManager[object]:
    """Return the context of one contestant: lines that are fetched ahead, None in turn."""
    if lines is None:
        return variants.in_turn()
    return mock.patch.object(variants, "AHEAD_LINES", lines)


def main() -> None:
    """Print the median microseconds of every contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen3,qwen1.5,mixtral,deepseek,olmoe,gpt-oss")
    parser.add_argument("--tokens", default="1,16,64,256,1024")
    options = parser.parse_args()
    for name in options.shapes.split(","):
        shape = shape_named(name)
        arguments = peers.int8_arguments(shape)
        for tokens in (int(count) for count in options.tokens.split(",")):
            inputs = draw(shape, tokens)
            captured, expected = [], torch.empty(0)
            for lines in (None, *LINES):
                # Which kernels a size gets depends on whether they may come early.
                eager._layer_variant.cache_clear()
                prepared.forget()
                with setting(lines):
                    label = "in turn" if lines is None else f"early {lines}"
                    captured.append(Captured(label, peers.eager(arguments), inputs))
                captured[-1].graph.replay()
                # Graphs share their memory: the next one may write here.
                output = captured[-1].output.clone()
                expected = output if lines is None else expected
                if not torch.equal(output, expected):
                    raise RuntimeError(f"{name}, {tokens} tokens, {label}: other bits than in turn")
            row = measure(shape, tokens, inputs, captured)
            times = ", ".join(f"{run.name} {row[run.name]:.1f}" for run in captured)
            print(f"{shape.name} T={tokens}: {times}", flush=True)
        del arguments, captured, inputs


if __name__ == "__main__":
    main()
