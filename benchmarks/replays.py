"""Capture functions as CUDA graphs and time single replays with a cold L2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def memory_pool() -> Any:
    """Return the pool that this process's graphs share: they never run at once."""
    return torch.cuda.graph_pool_handle()


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return the graph of a function that ran before, and the output that replays write."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory_pool()):
        output = run()
    return graph, output


def flush_buffer() -> Tensor:
    """Return what to write before a replay so that L2 holds nothing of it."""
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def replay_us(graph: torch.cuda.CUDAGraph, flush: Tensor) -> float:
    """Return the microseconds of one replay with a cold L2, by events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(1e3 * begin.elapsed_time(end))
