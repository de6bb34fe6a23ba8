"""Compare the experts layer with its peers: every row of shapes.py in one run, table and JSON.

One process per shape compiles and captures CUDA graphs beside the others; then they take turns
with the GPU to themselves. Medians of graph replays, contestants interleaved, L2 flushed and
routing drawn anew before every replay. --variants measures every variant of variants.py that
takes a shape beside the others, as eager launches, and prints them below the row.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import random
import statistics
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import replays
import torch
from shapes import SHAPES, TARGETS, Shape, floor_us, shape_named
from torch import Tensor

REPLAYS = 15
# Routings to draw until one uses the expected number of experts.
DRAWS = 1000
# Only at these numbers of tokens, to keep the run short.
SOME_TOKENS = {"static": (1, 64, 4096), "w8a16": (1, 64, 4096)}
CONTESTANTS = ("int8", "int8 eager", "static", "w8a16", "hf bf16", "humming")


class Captured:
    """One contestant at one size: a CUDA graph over inputs that stay in place.

    It holds the function, too: the graph reads what that owns (a peer's lists and locks).
    """

    def __init__(self, name: str, run: Any, inputs: tuple[Tensor, ...]) -> None:
        self.name = name
        self.run = run
        self.times: list[float] = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(2):
                run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            self.graph, self.output = replays.capture(lambda: run(*inputs))

    def replay(self, flush: Tensor) -> None:
        """Time one replay with a cold L2."""
        self.times.append(replays.replay_us(self.graph, flush))


def draw(shape: Shape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random activations, router weights and ids that use as many experts as is expected.

    A peer whose lists of rows are made for one routing would otherwise be measured by its luck.
    """
    missed = (1 - shape.top_k / shape.experts) ** tokens
    expected = round(shape.experts * (1 - missed))
    for _ in range(DRAWS):
        logits = torch.randn(tokens, shape.experts, device="cuda")
        weights, ids = torch.topk(torch.softmax(logits, -1), shape.top_k)
        if len(ids.unique()) == expected:
            break
    else:
        raise RuntimeError(f"none of {DRAWS} routings of {tokens} tokens used {expected} experts")
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
    return x, weights.to(torch.bfloat16), ids


def contestants(
    shape: Shape, wanted: tuple[str, ...], arguments: dict[str, Any], errors: dict[str, str]
) -> dict[str, Any]:
    """Return name -> function of (x, weights, ids), or what makes one for a routing."""
    import peers

    static = peers.scheme_options("static")
    makers = {
        "int8": lambda: peers.compiled(peers.eager(arguments)),
        "int8 eager": lambda: peers.eager(arguments),
        "static": lambda: peers.compiled(peers.eager(arguments, **static)),
        "w8a16": lambda: peers.compiled(peers.eager(arguments, activation_quant="none")),
        "hf bf16": lambda: torch.compile(peers.hugging_face(shape), fullgraph=True),
        "humming": lambda: peers.Humming(shape),
    }
    found = {}
    for name in wanted:
        try:
            found[name] = makers[name]()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
    return found


def capture(
    shape: Shape, tokens: int, runs: dict[str, Any], errors: dict[str, str]
) -> tuple[tuple[Tensor, ...], list[Captured]]:
    """Compile and capture every contestant at one size."""
    inputs = draw(shape, tokens)
    captured = []
    for name, run in runs.items():
        if tokens not in SOME_TOKENS.get(name, (tokens,)):
            continue
        try:
            if name == "hf bf16" and tokens > 1:
                for tensor in inputs:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            if name == "humming":
                if shape.is_gpt_oss:
                    continue
                run = run.prepare(inputs[2])
            captured.append(Captured(name, run, inputs))
        except Exception as error:
            errors[f"{name} {tokens}"] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
    return inputs, captured


def capture_variants(
    shape: Shape,
    inputs: tuple[Tensor, ...],
    quant: str,
    arguments: dict[str, Any],
    errors: dict[str, str],
) -> list[Captured]:
    """Capture every variant of the layer at one size, checked against the tables' kernels."""
    import peers

    from int8moe_compile.lowerings import variants

    captured = []
    expected: Tensor | None = None
    run = peers.eager(arguments)
    for variant in peers.variants_of(shape, inputs, quant):
        name = f"{quant}: {variants.label(variant)}"
        try:
            with variants.forced(variant):
                captured.append(Captured(name, run, inputs))
            captured[-1].graph.replay()
            output = captured[-1].output.clone()
            expected = output if expected is None else expected
            if quant != "none" and not torch.equal(output, expected):
                errors[f"{name} {inputs[0].shape[0]}"] = "other bits than the tables' kernels"
        except Exception as error:
            errors[f"{name} {inputs[0].shape[0]}"] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
    return captured


def measure(shape: Shape, tokens: int, inputs: tuple[Tensor, ...], runs: list[Captured]) -> Any:
    """Return a row: the median of every contestant, the floor and the target."""
    flush = replays.flush_buffer()
    active: list[int] = []
    for _ in range(REPLAYS):
        fresh = draw(shape, tokens)
        active.append(int(torch.unique(fresh[2]).numel()))
        for old, new in zip(inputs, fresh, strict=True):
            old.copy_(new)
        # In a new order each time: who follows whom decides how warm the GPU is.
        for run in random.sample(runs, len(runs)):
            run.replay(flush)
    experts = statistics.median(active)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "floor": floor_us(shape, int(experts), tokens),
        "target": TARGETS.get((shape.name, tokens)),
        **{run.name: statistics.median(run.times[2:]) for run in runs},
    }


@dataclass(frozen=True)
class Job:
    """Say what one process measures."""

    name: str
    tokens: tuple[int, ...]
    wanted: tuple[str, ...]
    variants: tuple[str, ...]


def worker(job: Job, barrier: Any, lock: Any, queue: Any) -> None:
    """Compile one shape's contestants, wait for the others, then measure alone."""
    import peers

    name, shape = job.name, shape_named(job.name)
    errors: dict[str, str] = {}
    prepared = []
    try:
        torch._dynamo.config.cache_size_limit = 64
        # Held here as long as the graphs that read them.
        arguments = peers.int8_arguments(shape)
        schemes = {quant: arguments | peers.scheme_options(quant) for quant in job.variants}
        runs = contestants(shape, job.wanted, arguments, errors)
        for count in job.tokens or shape.tokens:
            inputs, captured = capture(shape, count, runs, errors)
            for quant, held in schemes.items():
                captured += capture_variants(shape, inputs, quant, held, errors)
            prepared.append((count, inputs, captured))
    except Exception:
        errors["all"] = traceback.format_exc()[-600:]
    print(f"{name}: prepared", flush=True)
    barrier.wait()
    try:
        with lock:
            for count, inputs, captured in prepared:
                queue.put(("row", measure(shape, count, inputs, captured)))
            torch.cuda.synchronize()
    except Exception:
        errors["measuring"] = traceback.format_exc()[-600:]
    queue.put(("done", {"shape": name, "errors": errors}))


def line(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    cells = [f"{row['shape']:>18} {row['tokens']:>6} {row['floor']:8.0f} "]
    cells.append(f"{row['target'] or 0:7.0f} ")
    cells += [f"{row[name]:11.1f}" if name in row else f"{'-':>11}" for name in CONTESTANTS]
    variants = sorted((time, name) for name, time in row.items() if ": " in name)
    return "\n".join(["".join(cells), *(f"{time:36.1f}  {name}" for time, name in variants)])


def versions() -> dict[str, str]:
    """Return what was measured: hardware, versions, date."""
    found = {"gpu": torch.cuda.get_device_name(), "date": str(datetime.date.today())}
    for package in ("torch", "triton", "transformers", "humming-kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def main() -> None:
    """Run the processes, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--tokens", default="", help="numbers of tokens for every shape")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument(
        "--variants", default="", help="schemes (token, static, none) to measure every variant of"
    )
    parser.add_argument("--output", default="bench_experts.json")
    options = parser.parse_args()
    names = [shape_named(name).name for name in options.shapes.split(",")]
    tokens = tuple(int(count) for count in options.tokens.split(",") if count)
    wanted = tuple(name for name in options.contestants.split(",") if name)
    schemes = tuple(name for name in options.variants.split(",") if name)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    context = multiprocessing.get_context("spawn")
    barrier, lock, queue = context.Barrier(len(names)), context.Lock(), context.Queue()
    processes = [
        context.Process(
            target=worker, args=(Job(name, tokens, wanted, schemes), barrier, lock, queue)
        )
        for name in names
    ]
    for process in processes:
        process.start()
    heading = "".join(f"{name:>11}" for name in CONTESTANTS)
    print(f"{'shape':>18} {'tokens':>6} {'floor':>8} {'target':>7} {heading}", flush=True)
    result: dict[str, Any] = {"versions": versions(), "rows": [], "errors": {}}
    left = len(processes)
    while left:
        kind, value = queue.get()
        if kind == "row":
            result["rows"].append(value)
            print(line(value), flush=True)
        else:
            left -= 1
            result["errors"][value["shape"]] = value["errors"]
            for where, text in value["errors"].items():
                print(f"{value['shape']} {where}: {text}", flush=True)
        Path(options.output).write_text(json.dumps(result, indent=1))
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
