"""Compile humming-kernels' products for every row of shapes.py into its cache on disk.

It compiles CUDA C++ for minutes; run beside the tests, this keeps that out of the benchmark.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shapes import SHAPES, shape_named


def compile_row(job: tuple[str, int]) -> str:
    """Compile both products of one shape at one number of tokens; returns a line of the report."""
    from peers import Humming

    name, tokens = job
    shape = shape_named(name)
    H, I = shape.hidden, shape.intermediate  # noqa: E741
    begin = time.perf_counter()
    try:
        for n, k in ((2 * I, H), (H, I)):
            Humming.kernel(Humming.config(n, k, shape.experts), tokens * shape.top_k)
    except Exception as error:
        traceback.print_exc()
        return f"{name} {tokens}: {type(error).__name__}: {str(error)[:200]}"
    return f"{name} {tokens}: {time.perf_counter() - begin:.0f} s"


def main() -> None:
    """Compile one row alone, which builds what all share, then the others side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    wanted = [shape_named(name) for name in options.shapes.split(",")]
    jobs = [(s.name, tokens) for s in wanted if not s.is_gpt_oss for tokens in s.tokens]
    torch.cuda.init()
    print(compile_row(jobs[0]), flush=True)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for line in pool.imap_unordered(compile_row, jobs[1:]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
