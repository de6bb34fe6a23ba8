"""Time the kernels of "decode" over tiles, beside those that take every call.

Kernels are compiled by worker processes first. Prints, for each kernel, its fastest tiles.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shapes import SHAPES, Shape, shape_named
from sweep_tiles import arguments
from torch.profiler import ProfilerActivity, profile

from int8moe_compile.lowerings import decode_tiles, eager, tiles, variants
from int8moe_compile.lowerings.variants import Variant
from int8moe_compile.ops.arguments import ExpertsArguments

# Columns and warps of a program.
TILES = ((1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 4), (8, 8))
# Words of four codes that a thread may hold.
MOST_WORDS = 128
REPEATS = 8


def sweep(shape: Shape, call: ExpertsArguments) -> Iterator[Variant]:
    """Yield variants whose products' tiles fit into registers, the tables' own first."""
    own = variants.decode_variant(*eager.layer_products(call))
    assert own is not None, "too many contributions for decode"
    yield own
    slots = tiles.whole_slots(shape.top_k)
    if call.activation_quant == "none":
        for pair in itertools.product(decode_tiles.FLOAT_FIRST, decode_tiles.float_second(slots)):
            yield Variant("decode", *pair)
        return
    for columns, warps in TILES:
        up_words = 2 * columns * own.up.block_k // 4 // (32 * warps)
        down_words = slots * columns * own.down.block_k // 4 // (32 * warps)
        up = replace(own.up, block_n=columns, num_warps=warps)
        down = replace(own.down, block_n=columns, num_warps=warps)
        if up_words <= MOST_WORDS or down_words <= MOST_WORDS:
            yield Variant(
                "decode",
                up if up_words <= MOST_WORDS else own.up,
                down if down_words <= MOST_WORDS else own.down,
            )


def compile_some(job: tuple[str, str, int, int]) -> None:
    """Compile some of a shape's kernels into Triton's cache, by running them on few experts."""
    name, quant, first, step = job
    shape = shape_named(name)
    # As many as kernels are compiled alike for: a multiple of 16, or not.
    shape = replace(shape, experts=8 if shape.experts % 16 else 16)
    call = arguments(shape, 1, quant)
    for variant in list(sweep(shape, call))[first::step]:
        with variants.forced(variant):
            eager.experts(call)
    torch.cuda.synchronize()


def kernel_times(call: ExpertsArguments, variant: Variant, flush: torch.Tensor) -> dict[str, float]:
    """Return the median microseconds of each launch of a call, by kernel and turn."""
    with variants.forced(variant), variants.in_turn():
        for _ in range(2):
            eager.experts(call)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(REPEATS):
                flush.zero_()
                eager.experts(call)
            torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if event.name.endswith("_kernel"):
            times[event.name.removesuffix("_kernel")].append(event.device_time)
    found = {}
    for name, values in times.items():
        turns = len(values) // REPEATS
        for turn in range(turns):
            label = name if turns == 1 else f"{name} {turn + 1}"
            found[label] = statistics.median(values[turn::turns])
    return found


def measure(name: str, tokens: int, quant: str, flush: torch.Tensor) -> None:
    """Print the times of one shape at one number of tokens."""
    shape = shape_named(name)
    call = arguments(shape, tokens, quant)
    apart = kernel_times(call, eager.apart_variant(call), flush)
    print(name, tokens, "apart", ", ".join(f"{k} {us:.1f}" for k, us in apart.items()), flush=True)
    rows: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for variant in sweep(shape, call):
        for kernel, us in kernel_times(call, variant, flush).items():
            tile = variant.up if kernel == "decode_up" else variant.down
            rows[kernel].append((us, f"{tile.block_n}k{tile.block_k}w{tile.num_warps}"))
    for kernel, found in rows.items():
        best = sorted(set(found))[:6] if kernel.startswith("decode") else [min(found)]
        print("   ", kernel, " ".join(f"{us:.1f}:{label}" for us, label in best), flush=True)


def main() -> None:
    """Compile, then sweep the shapes named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--tokens", default="1,2,4")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument(
        "--quant", choices=("token", "none"), default="token", help="none: weight-only"
    )
    options = parser.parse_args()
    names = options.shapes.split(",")
    jobs = [(name, options.quant, first, 3) for name in names for first in range(3)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        pool.map(compile_some, jobs, chunksize=1)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for name in names:
        for tokens in (int(count) for count in options.tokens.split(",")):
            measure(name, tokens, options.quant, flush)


if __name__ == "__main__":
    main()
