"""Time the CPU kernel's parts: the way to the kernel, and products of few and many rows.

"calls": the eager operator against the call that a compiled graph makes, for a layer so small that
only the way to the kernel counts; "cold" reads 96 MB before each call, as a layer's weights do.
"tiles": cpp/product.h alone, compiled with a loop around it: operations a second from cache, and
the bytes of weights a second from memory beside a plain read.

    PYTHONPATH=. python benchmarks/cpu_parts.py
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import int8moe_compile  # noqa: F401
from int8moe_compile.lowerings import cpu, cpu_build
from int8moe_compile.ops.arguments import ExpertsArguments

HARNESS = """
#include <cstring>
#include "product.h"
using namespace int8moe;
extern "C" __attribute__((visibility("default"))) void rows_by_weights(
    const void* codes, int64_t rows, const int8_t* weights, int64_t count, int64_t depth,
    int64_t block, int64_t repeats, int32_t* out) {
  const IntegerLanes::Code* pointers[64];
  for (int64_t i = 0; i < rows; ++i) {
    pointers[i] = static_cast<const IntegerLanes::Code*>(codes) + i * depth;
  }
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    for (int64_t j = 0; j + block <= count; j += block) {
      const WeightRows some{weights + j * depth, depth, block, depth};
      product<IntegerLanes>(pointers, rows, some, out, block);
    }
  }
}
"""
DEPTH, BLOCK, REPEATS = 1024, 256, 300


def median_seconds(call: Callable[[], object], before: Callable[[], object], times: int) -> float:
    """Return the median time of a call, each after an untimed one of before."""
    measured = []
    for _ in range(times):
        before()
        start = time.perf_counter()
        call()
        measured.append(time.perf_counter() - start)
    return statistics.median(measured)


def calls() -> None:
    """Print microseconds of the operator and of a graph's call."""
    w13 = torch.randint(-127, 128, (8, 64, 64), dtype=torch.int8)
    w2 = torch.randint(-127, 128, (8, 64, 32), dtype=torch.int8)
    call = ExpertsArguments(
        torch.randn(1, 64),
        *(w13, torch.full((8, 64), 1e-3), w2, torch.full((8, 64), 1e-3)),
        *(torch.rand(1, 2), torch.tensor([[1, 3]])),
    )
    names = call._fields[:7]
    options = {key: value for key, value in call._asdict().items() if key not in names}
    direct = cpu.GraphCall(names, cpu.Layouts.of(call), options)
    out = torch.empty(1, 64)
    large = torch.ones(24 << 20)
    ways: dict[str, Callable[[], object]] = {
        "operator": lambda: torch.ops.int8moe.experts(*call[:7]),
        "graph's call": lambda: direct(*call[:7], out=out),
    }
    with torch.inference_mode():
        for name, way in ways.items():
            for _ in range(500):
                way()
            hot = median_seconds(way, lambda: None, 3000)
            cold = median_seconds(way, large.sum, 60)
            print(f"{name:14} {hot * 1e6:6.1f} us, cold {cold * 1e6:6.1f} us")


def harness(folder: Path) -> ctypes.CDLL:
    """Compile product.h with a loop around it, by the kernel's own compiler and flags."""
    source = folder / "harness.cpp"
    source.write_text(HARNESS)
    library = folder / "harness.so"
    command = [*cpu_build.find_compiler(), *cpu_build.FLAGS, "-march=native"]
    subprocess.run(
        [*command, f"-I{cpu_build.SOURCES}", str(source), "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


def tiles(library: ctypes.CDLL) -> None:
    """Print one core's rates of the products of 1 to 64 rows with weights of DEPTH columns."""
    codes = torch.ones(64, DEPTH, dtype=torch.int16)
    cached = torch.ones(48, DEPTH, dtype=torch.int8)
    memory = torch.ones(192 << 10, DEPTH, dtype=torch.int8)
    out = torch.empty(64 * BLOCK, dtype=torch.int32)

    def run(rows: int, weights: torch.Tensor, block: int, repeats: int) -> None:
        sizes = [ctypes.c_int64(size) for size in (weights.shape[0], DEPTH, block, repeats)]
        library.rows_by_weights(
            ctypes.c_void_p(codes.data_ptr()),
            *(ctypes.c_int64(rows), ctypes.c_void_p(weights.data_ptr())),
            *(*sizes, ctypes.c_void_p(out.data_ptr())),
        )

    torch.set_num_threads(1)
    read = median_seconds(memory.view(torch.int64).sum, lambda: None, 5)
    print(f"one core, plain read {memory.numel() / read / 1e9:.1f} GB/s")
    for rows in (1, 2, 3, 4, 8, 16, 64):
        again = functools.partial(run, rows, cached, 48, REPEATS)
        hot = median_seconds(again, lambda: None, 9) / REPEATS
        cold = median_seconds(functools.partial(run, rows, memory, BLOCK, 1), lambda: None, 5)
        print(
            f"{rows:3} rows: from cache {2e-9 * rows * cached.numel() / hot:6.1f} GOPS, "
            f"from memory {2e-9 * rows * memory.numel() / cold:6.1f} GOPS, "
            f"{memory.numel() / cold / 1e9:5.1f} GB/s of weights"
        )


def main() -> None:
    """Print both tables."""
    calls()
    with tempfile.TemporaryDirectory() as folder:
        tiles(harness(Path(folder)))


if __name__ == "__main__":
    main()
