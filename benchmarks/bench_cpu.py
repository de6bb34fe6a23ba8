"""Time one experts layer on CPU: the INT8 operator against every compiled Hugging Face variant.

Variants are interleaved in one process and medians reported, so that a busy machine slows all of
them alike; the best Hugging Face variant of each size is what the INT8 time is divided into, and a
plain read of memory takes its turn with them. With few tokens a graph is four calls of the layer,
each with a routing of its own, as the layers of a model are: that shares what entering a compiled
graph costs, and weights come from memory unless the caches hold those of all experts. All variants
get the same routings; weights and routing are random. --in-cache is the other extreme: one call a
graph, again and again with one routing, so that caches hold what fits.

    PYTHONPATH=. python benchmarks/bench_cpu.py --shape qwen3-small --json out.json
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import int8moe_compile  # noqa: F401
from int8moe_compile.lowerings import cpu_build
from int8moe_compile.ops.quantize import quantize_weight


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer and the token counts to run."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: tuple[int, ...]


SHAPES = {
    "qwen3-small": Shape(32, 4, 1024, 768, (1, 16, 128, 1024)),
    "qwen1.5-moe": Shape(60, 4, 2048, 1408, (1, 16, 128)),
}
DTYPES = (torch.float32, torch.bfloat16)
# batched_mm copies one expert's weights for every contribution: more than this is not run.
BATCHED_BYTES = 1 << 30
MINIMUM_TURNS, ROUTINGS = 5, 48
# The read that takes its turn: more than caches hold.
READ_BYTES = 128 << 20

Routing = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Method:
    """How a layer is called: calls a compiled graph makes, and runs of a graph in a turn."""

    calls: int
    runs: int

    @classmethod
    def of(cls, tokens: int, *, in_cache: bool) -> Method:
        """Choose for a number of tokens."""
        if in_cache:
            return cls(1, 20 if tokens <= 16 else 3)
        return cls(4 if tokens <= 16 else 1, 1)


@dataclass(frozen=True)
class Row:
    """One measured size: milliseconds by variant, what INT8 gains, and its weight bandwidth."""

    shape: str
    tokens: int
    milliseconds: dict[str, float]
    best_hf: str
    speedup: float
    int8_gigabytes_per_second: float
    read_gigabytes_per_second: float
    share_of_read_bandwidth: float


def make_hf(
    shape: Shape, name: str, dtype: torch.dtype, w13: Tensor, w2: Tensor
) -> Callable[..., Tensor]:
    """Build the experts module that Hugging Face would run, not yet compiled."""
    config = transformers.Qwen3MoeConfig(
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = name
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(w13.to(dtype), requires_grad=False)
    module.down_proj = torch.nn.Parameter(w2.to(dtype), requires_grad=False)
    return module


def make_torchao(
    shape: Shape, dtype: torch.dtype, w13: Tensor, w2: Tensor
) -> Callable[..., Tensor] | None:
    """Quantise a Hugging Face module by torchao, where that is installed (pip install torchao).

    Its int8 weights run in the loop over experts only, which does not compile into one graph.
    """
    if importlib.util.find_spec("torchao") is None:
        return None
    quantization = importlib.import_module("torchao.quantization")
    holder = torch.nn.Module()
    holder.experts = make_hf(shape, "eager", dtype, w13, w2)  # type: ignore[assignment]
    rule = quantization.Int8DynamicActivationInt8WeightConfig()
    names = ("experts.gate_up_proj", "experts.down_proj")
    quantization.quantize_(
        holder, quantization.FqnToConfig(dict.fromkeys(names, rule)), filter_fn=None
    )
    experts: Callable[..., Tensor] = holder.experts
    return experts


def make_int8(w13: Tensor, w2: Tensor) -> Callable[..., Tensor]:
    """Quantise the same weights; the result takes what a Hugging Face module takes."""
    (w13_codes, w13_scale), (w2_codes, w2_scale) = quantize_weight(w13), quantize_weight(w2)

    def int8(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = torch.ops.int8moe.experts(
            x, w13_codes, w13_scale, w2_codes, w2_scale, weights, ids
        )
        return result

    return int8


def median_times(
    graphs: dict[str, Callable[..., object]],
    routings: Sequence[Routing],
    method: Method,
    seconds: float,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Return the median milliseconds of each graph on a clock; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start = time.perf_counter()
    turn = 0
    while turn < MINIMUM_TURNS or time.perf_counter() - start < seconds:
        at = turn * method.calls % (len(routings) - method.calls + 1)
        for name, graph in graphs.items():
            for _ in range(method.runs):
                before = clock()
                graph(routings[at : at + method.calls])
                times[name].append((clock() - before) * 1e3)
        turn += 1
    return {name: statistics.median(values) for name, values in times.items()}


def route(tokens: int, shape: Shape) -> Routing:
    """Draw expert ids [T,K] and their fp32 weights [T,K]."""
    weights, ids = torch.softmax(torch.randn(tokens, shape.experts), -1).topk(shape.top_k)
    return ids, weights


def each_call(
    layer: Callable[..., Tensor], x: Tensor, wrap: Callable[..., Any] = lambda function: function
) -> Callable[[Sequence[Routing]], list[Tensor]]:
    """Call a layer on one x [T,H] for each routing, whose weights take x's dtype."""

    def calls(x: Tensor, routings: Sequence[Routing]) -> list[Tensor]:
        return [layer(x, ids, weights) for ids, weights in routings]

    graph = wrap(calls)
    return lambda routings: graph(x, [(ids, weights.to(x.dtype)) for ids, weights in routings])


def bench(
    name: str, shape: Shape, seconds: float, clock: Callable[[], float], *, in_cache: bool
) -> list[Row]:
    """Measure every token count of one shape."""
    torch.manual_seed(0)
    w13 = torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden)
    w13 /= math.sqrt(shape.hidden)
    w2 = torch.randn(shape.experts, shape.hidden, shape.intermediate)
    w2 /= math.sqrt(shape.intermediate)
    layers = {
        (variant, dtype): make_hf(shape, variant, dtype, w13, w2)
        for dtype in DTYPES
        for variant in ("grouped_mm", "batched_mm")
    }
    layers |= dict.fromkeys((("int8", dtype) for dtype in DTYPES), make_int8(w13, w2))
    torchao = make_torchao(shape, torch.bfloat16, w13, w2)
    del w13, w2
    to_read = torch.ones(READ_BYTES // 4)
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True)
    results = []
    for tokens in shape.tokens:
        torch.compiler.reset()  # all variants share code objects, and so one recompilation limit
        x = torch.randn(tokens, shape.hidden)
        routings = [route(tokens, shape) for _ in range(ROUTINGS)]
        method = Method.of(tokens, in_cache=in_cache)
        graphs: dict[str, Callable[..., object]] = {"read": lambda _: to_read.sum()}
        for (variant, dtype), layer in layers.items():
            copied = 3 * tokens * shape.top_k * shape.hidden * shape.intermediate * dtype.itemsize
            if variant != "batched_mm" or copied <= BATCHED_BYTES:
                graphs[f"{variant} {str(dtype)[6:]}"] = each_call(layer, x.to(dtype), compiled)
        if torchao is not None:
            graphs["torchao eager"] = each_call(torchao, x.bfloat16())
        for graph in graphs.values():
            graph(routings[: method.calls])
            graph(routings[-method.calls :])
        times = median_times(graphs, routings, method, seconds, clock)
        bandwidth = READ_BYTES / (times.pop("read") * 1e-3)
        times = {label: value / method.calls for label, value in times.items()}
        results.append(summary(name, shape, routings, times, bandwidth))
        print(line(results[-1]), flush=True)
    return results


def summary(
    name: str,
    shape: Shape,
    routings: Sequence[Routing],
    times: dict[str, float],
    bandwidth: float,
) -> Row:
    """Divide the best Hugging Face time by the slower of the two INT8 times."""
    hf = [label for label in times if not label.startswith(("int8", "torchao"))]
    best_hf = min(hf, key=times.__getitem__)
    ours = max(value for label, value in times.items() if label.startswith("int8"))
    used = statistics.median(ids.unique().numel() for ids, _ in routings)
    read = used * 3 * shape.hidden * shape.intermediate
    speed = read / (ours * 1e-3)
    return Row(
        shape=name,
        tokens=routings[0][0].shape[0],
        milliseconds={label: round(value, 3) for label, value in times.items()},
        best_hf=best_hf,
        speedup=round(times[best_hf] / ours, 2),
        int8_gigabytes_per_second=round(speed / 1e9, 2),
        read_gigabytes_per_second=round(bandwidth / 1e9, 2),
        share_of_read_bandwidth=round(speed / bandwidth, 2),
    )


def line(row: Row) -> str:
    """Format one row of the table."""
    times = "  ".join(f"{name} {value:.2f}" for name, value in row.milliseconds.items())
    return (
        f"{row.shape:12} T {row.tokens:5}  ms: {times}  | {row.speedup:.2f}x over {row.best_hf}, "
        f"{row.int8_gigabytes_per_second:.1f} GB/s ({row.share_of_read_bandwidth:.0%} of reading)"
    )


def torchao_version() -> str | None:
    """Return torchao's version where it is installed."""
    found = importlib.util.find_spec("torchao") is not None
    return importlib.metadata.version("torchao") if found else None


def cpu_model() -> str:
    """Return the processor's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for entry in path.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Run the shapes asked for, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--seconds", type=float, default=4.0, help="a size's measuring time")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="on a machine that others use: one thread, and its processor time, not the wall's",
    )
    parser.add_argument(
        "--in-cache",
        action="store_true",
        help="one call a graph and one routing for all runs of a turn",
    )
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    clock = time.thread_time if options.busy else time.perf_counter
    if options.busy:
        torch.set_num_threads(1)
    facts = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "clock": clock.__name__,
        "in_cache": options.in_cache,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "kernel": "compiled" if cpu_build.kernel() else "plain",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torchao": torchao_version(),
    }
    print(facts, flush=True)
    chosen = SHAPES if options.shape == "all" else {options.shape: SHAPES[options.shape]}
    rows: list[Row] = []
    with torch.no_grad():  # torchao's tensors refuse inference mode
        for name, shape in chosen.items():
            rows += bench(name, shape, options.seconds, clock, in_cache=options.in_cache)
    if options.json:
        options.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
