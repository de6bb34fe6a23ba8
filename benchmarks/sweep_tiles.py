"""Time both grouped products of every shape over many tiles; the tables in tiles.py come from it.

Kernels are compiled by worker processes first, because a compilation takes longer than its runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import replays
import torch
from shapes import SHAPES, Shape

from int8moe_compile.lowerings import (
    eager,
    eager_variants,
    routing,
    tiles,
    variant_layers,
    variant_rows,
    variants,
)
from int8moe_compile.ops.arguments import ExpertsArguments

LIMIT = 232448


def sweep(panels: int, a_bytes: int) -> Iterator[tiles.Tile]:
    """Yield the tiles to compare for a product of one or two panels."""
    # Two warps convert more columns for each row of activations that they load.
    few_warps = ((32, 2), (64, 2)) if a_bytes > 1 else ()
    widths = (*few_warps, (32, 4), (64, 4), (128, 4), (128, 8), (256, 8))
    for block_m, (block_n, warps), block_k, stages in itertools.product(
        (16, 32, 64, 128), widths, (64, 128, 256), (3, 4, 5)
    ):
        accumulators = block_m * block_n * panels // (32 * warps)
        product = tiles.Product(1, 1, 4096, 4096, panels, a_bytes)
        tile = tiles.Tile(block_m, block_n, block_k, warps, stages)
        device = tiles.DeviceFacts("cuda", (9, 0), "sm_90", LIMIT, 132)
        fits = tiles.shared_memory(tile, product, device) <= LIMIT
        deep_enough = block_k > 64 or block_m >= 64
        if fits and 4 <= accumulators <= 256 and deep_enough and not (stages == 5 and block_m > 64):
            yield tile


def sweep_fused(panels: int, a_bytes: int) -> Iterator[tiles.Tile]:
    """Yield the tiles to compare for a fused product of one or two panels; a_bytes is 1."""
    device = tiles.DeviceFacts("cuda", (9, 0), "sm_90", LIMIT, 132)
    widths = ((32, 4), (64, 4), (128, 4), (128, 8), (256, 4), (256, 8))
    for block_m, (block_n, warps), stages, programs, loads in itertools.product(
        (16, 32, 64, 128), widths, (3, 4, 6), (0, 1, 2), ("weights", "both")
    ):
        tile = tiles.Tile(block_m, block_n, 128, warps, stages, 8, loads, programs)
        shared = tiles.shared_memory(tile, tiles.Product(1, 1, 4096, 4096, panels), device)
        accumulators = block_m * block_n * panels // (32 * warps)
        if shared * max(1, programs) > LIMIT - 8192 or not 8 <= accumulators <= 128:
            continue
        if block_m >= 64 and block_n == 32:
            continue
        is_narrow = block_m <= 32
        if is_narrow and (programs or stages == 3 or loads != ("weights", "both")[panels == 1]):
            continue
        if not is_narrow and (
            stages == 6 or accumulators < 32 or (panels == 1 and loads != "both")
        ):
            continue
        yield tile
        if block_m == 128:
            yield replace(tile, has_tail=True)
            if programs == 1:
                yield replace(tile, is_flat=True)


def arguments(shape: Shape, tokens: int, quant: str) -> ExpertsArguments:
    """Return random arguments of the operator on the GPU, for a word of activation_quant."""
    E, K, H, I = shape.experts, shape.top_k, shape.hidden, shape.intermediate  # noqa: E741
    logits = torch.randn(tokens, E, device="cuda")
    weights, ids = torch.topk(torch.softmax(logits, -1), K)
    return ExpertsArguments(
        torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16),
        torch.randint(-127, 128, (E, 2 * I, H), device="cuda", dtype=torch.int8),
        torch.rand(E, 2 * I, device="cuda") * 1e-3,
        torch.randint(-127, 128, (E, H, I), device="cuda", dtype=torch.int8),
        torch.rand(E, H, device="cuda") * 1e-3,
        weights.to(torch.bfloat16),
        ids,
        activation_quant=quant,
    )


def stages_of(
    call: ExpertsArguments, block_m: int
) -> tuple[Callable[[tiles.Tile], Any], Callable[[tiles.Tile], Any]]:
    """Return functions that launch each product with a tile of so many rows."""
    plan = routing.plan(call.topk_ids, None, num_experts=call.w13.shape[0], block_m=block_m)
    rows = eager.first_rows(call, plan)
    middle = torch.randn(
        plan.contributions, call.intermediate_size, device="cuda", dtype=torch.bfloat16
    )
    second = eager.second_rows(call, plan, middle)
    return (
        lambda tile: eager.launch_up(call, plan, rows, tile),
        lambda tile: eager.launch_down(call, plan, second, tile),
    )


def fused_stages_of(
    call: ExpertsArguments, block_m: int
) -> tuple[Callable[[tiles.Tile], Any], Callable[[tiles.Tile], Any]]:
    """Return functions that launch each fused product, the second quantisation left out."""
    host = eager_variants.EagerHost(call)
    plan = routing.plan(
        call.topk_ids, None, num_experts=call.w13.shape[0], block_m=block_m, is_inverse_wanted=True
    )
    first = eager.first_rows(call, plan)
    by_token = (first.values, first.scale, first.has_row_scale)
    ordered = variant_rows.spread(host, plan)
    shape = (plan.contributions, call.intermediate_size)
    codes = torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)
    scale = torch.rand(plan.contributions, device="cuda") * 1e-3

    def up(tile: tiles.Tile) -> Any:
        rows = ordered if tile.is_ordered else by_token
        return variant_layers.first_product(host, plan, rows, tile)

    def down(tile: tiles.Tile) -> Any:
        return variant_layers.second_product(host, plan, codes, scale, True, tile)

    return up, down


def compile_some(jobs: list[tuple[bool, str, dict[str, Any]]]) -> None:
    """Compile kernels into Triton's cache by running them on a tiny layer."""
    for is_up, quant, tile in jobs:
        shape = Shape("tiny", 4, 2, 512, 512, (1,))
        call = arguments(shape, 32, quant)
        makes = stages_of if tile["loads"] == "pointers" else fused_stages_of
        launch = makes(call, tile["block_m"])[0 if is_up else 1]
        try:
            launch(tiles.Tile(**tile))
            torch.cuda.synchronize()
        except Exception as error:
            print("cannot", is_up, tile, type(error).__name__, str(error)[:100], flush=True)


def median_us(run: Callable[[], Any], flush: torch.Tensor, repeats: int) -> float:
    """Return the median time of a launch with a cold L2, by replays of its graph."""
    run()
    torch.cuda.synchronize()
    graph, _ = replays.capture(run)
    return statistics.median(replays.replay_us(graph, flush) for _ in range(repeats))


def measure(
    shape: Shape,
    tokens: int,
    quant: str,
    found: list[dict[str, Any]],
    makes: Callable[..., Any],
    tiles_of: Callable[[int], Iterator[tiles.Tile]],
) -> None:
    """Time the tiles that suit one number of tokens."""
    call = arguments(shape, tokens, quant)
    flush = replays.flush_buffer()
    rows = tiles.rows_per_expert(tokens * shape.top_k, shape.experts)
    repeats = 7 if tokens < 4096 else 4
    for block_m in (16, 32, 64, 128):
        if (block_m > 16 and rows * 4 < block_m) or (block_m < 64 and rows > 200):
            continue
        for name, launch, panels in zip(("up", "down"), makes(call, block_m), (2, 1), strict=True):
            for tile in tiles_of(panels):
                if tile.block_m != block_m:
                    continue
                for group_m in (8, 32) if rows > 128 else (1,):
                    tile = replace(tile, group_m=group_m)
                    try:
                        time = median_us(lambda run=launch, t=tile: run(t), flush, repeats)
                    except Exception as error:
                        print("failed", name, tile, str(error)[:80], flush=True)
                        continue
                    row = {"shape": shape.name, "tokens": tokens, "product": name, "us": time}
                    found.append(row | {"label": variants.tile_label(tile)} | asdict(tile))


def report(found: list[dict[str, Any]]) -> None:
    """Print the three best tiles of each product for each size and M tile."""
    for key, group in itertools.groupby(
        found, lambda row: (row["shape"], row["tokens"], row["block_m"], row["product"])
    ):
        best = sorted(group, key=lambda row: row["us"])[:3]
        text = "  ".join(
            f"{b['us']:.1f}:{b['label']}k{b['block_k']}g{b['group_m']} {b['loads']}" for b in best
        )
        print(*key, text, flush=True)


def main() -> None:
    """Sweep the shapes named, write all times to a JSON file and print the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--tokens", default="")
    parser.add_argument("--output", default="sweep_tiles.json")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--fused", action="store_true", help="sweep the kernels of variants.py")
    parser.add_argument(
        "--only",
        default="",
        help="labels of tiles, with a depth or all: 128x64w4s3p2t,16x64w4s4k128",
    )
    parser.add_argument(
        "--quant", choices=("token", "none"), default="token", help="none: weight-only, by pointers"
    )
    options = parser.parse_args()
    if options.fused and options.quant == "none":
        parser.error("--fused: the kernels of variants.py multiply codes, wanted --quant token")
    wanted = [s for s in SHAPES if any(s.name.startswith(n) for n in options.shapes.split(","))]
    makes, every = (fused_stages_of, sweep_fused) if options.fused else (stages_of, sweep)
    only = {label for label in options.only.split(",") if label}

    def tiles_of(panels: int) -> Iterator[tiles.Tile]:
        for tile in every(panels, 2 if options.quant == "none" else 1):
            label = f"{tile.block_m}x{variants.tile_label(tile)}"
            if not only or only & {label, f"{label}k{tile.block_k}"}:
                yield tile

    jobs = [
        (is_up, options.quant, asdict(tile))
        for is_up in (True, False)
        for tile in tiles_of(2 if is_up else 1)
    ]
    parts = [jobs[start :: options.workers] for start in range(options.workers)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        pool.map(compile_some, parts, chunksize=1)
    print(f"compiled {len(jobs)} kernels", flush=True)
    found: list[dict[str, Any]] = []
    for shape in wanted:
        counts = [int(t) for t in options.tokens.split(",") if t] or shape.tokens
        for tokens in counts:
            measure(shape, tokens, options.quant, found, makes, tiles_of)
            report([row for row in found if row["shape"] == shape.name and row["tokens"] == tokens])
            Path(options.output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
