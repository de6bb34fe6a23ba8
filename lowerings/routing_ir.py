"""The routing of a compiled graph: the kernels of routing_kernels.py as nodes of Inductor's graph.

They are launched as a user's own Triton kernels are, so that the compiled code holds their text
and needs no operator of ours when it runs. T tokens, K experts per token, E local experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
from torch._inductor import ir
from torch._inductor.lowering import empty_strided
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv, Max, Min

from ..compat_inductor import launch_in_graph
from . import routing_kernels
from .routing import CHUNK_BLOCK, ONE_LAUNCH, chunk_sizes, most_chunks, place_sizes

# What an unbacked size is taken for where tiles are chosen.
UNKNOWN_SIZE: Final = 2048


@dataclass(frozen=True)
class GraphPlan:
    """Hold order [T*K], local [T*K], tiles [1 + bound, 3] as routing.Plan does, as buffers."""

    order: ir.TensorBox
    local: ir.TensorBox
    tiles: ir.TensorBox
    inverse: ir.TensorBox | None = None
    progress: ir.TensorBox | None = None


def is_between(size: Any, least: int, most: int) -> Any:
    """Return 1 if least < size <= most, else 0, in arithmetic that every wrapper can print."""
    is_over, is_under = Max(0, size - least), Max(0, most + 1 - size)
    return Min(1, is_over) * Min(1, is_under)


def likely_size(size: Any) -> int:
    """Return a likely value of a size, without a guard; one that nobody knows is large."""
    return int(V.graph.sizevars.optimization_hint(size, fallback=UNKNOWN_SIZE))


@functools.cache
def _configured(name: str, num_warps: int) -> Any:
    """Return a routing kernel with its number of warps: a graph takes it from a configuration."""
    config = triton.Config({}, num_warps=num_warps)
    return triton.autotune([config], key=[])(getattr(routing_kernels, name))


def _empty(device: torch.device | None, *size: Any, dtype: torch.dtype) -> Any:
    return empty_strided(list(size), None, dtype=dtype, device=device)


def plan(
    topk_ids: ir.TensorBox,
    expert_map: ir.TensorBox | None,
    *,
    num_experts: int,
    block_m: int,
    is_inverse_wanted: bool = False,
    is_progress_wanted: bool = False,
    is_wanted: Any = 1,
    empty: Callable[..., Any] | None = None,
    is_early: bool = False,
) -> GraphPlan:
    """Put the routing of T*K contributions into the graph; one launch, or two beyond ONE_LAUNCH.

    is_wanted: 0 where nothing is launched; empty: makes buffers; is_early: dependent_launch.py.
    """
    device = topk_ids.get_device()
    tokens, top_k = topk_ids.get_size()
    contributions = tokens * top_k
    ids = ir.ExternKernel.require_contiguous(topk_ids)
    rows = 1 + CeilDiv(contributions, block_m) + num_experts
    known = None if expert_map is None else ir.ExternKernel.require_contiguous(expert_map)
    map_size = 0 if expert_map is None else expert_map.get_size()[0]
    buffer = functools.partial(empty or functools.partial(_empty, device), dtype=torch.int32)
    order, local, tile_list = buffer(contributions), buffer(contributions), buffer(rows, 3)
    source = {
        "local_ptr": local,
        "ids_ptr": ids,
        "map_ptr": known,
        "num_contributions": contributions,
        "top_k": top_k,
        "num_experts": num_experts,
        "map_size": map_size,
        "stride_it": top_k,
        "stride_ik": 1,
        "HAS_MAP": known is not None,
        "IS_FLAT": True,
    }
    placed = {
        "order_ptr": order,
        "tiles_ptr": tile_list,
        "inverse_ptr": buffer(contributions) if is_inverse_wanted else None,
        "progress_ptr": buffer(1 + rows) if is_progress_wanted else None,
        "BLOCK_M": block_m,
        "HAS_INVERSE": is_inverse_wanted,
        "HAS_PROGRESS": is_progress_wanted,
    }
    if V.graph.sizevars.statically_known_leq(contributions, ONE_LAUNCH):
        sizes = place_sizes(likely_size(contributions), num_experts)
        _launch("place_kernel", num_experts * is_wanted, {**source, **placed}, sizes, is_early)
    else:
        sizes = chunk_sizes(num_experts)
        programs = Min(most_chunks(num_experts), CeilDiv(contributions, CHUNK_BLOCK)) * is_wanted
        # As many rows as there may be, so that the table's size is known.
        counts = buffer(most_chunks(num_experts), sizes["BINS"])
        between = {"counts_ptr": counts, "ranks_ptr": buffer(contributions)}
        _launch("count_kernel", programs, {**source, **between}, sizes, is_early)
        placed |= {**between, "local_ptr": local, "num_contributions": contributions}
        _launch("scatter_kernel", programs, placed, sizes, is_early)
    return GraphPlan(order, local, tile_list, placed["inverse_ptr"], placed["progress_ptr"])


def _launch(
    name: str, programs: Any, arguments: dict[str, Any], sizes: dict[str, int], is_early: bool
) -> None:
    """Put one routing kernel into the graph."""
    known = {key: size for key, size in sizes.items() if key != "num_warps"}
    kernel = _configured(name, sizes["num_warps"])
    launch_in_graph(kernel, (programs, 1, 1), arguments | known, is_early=is_early)
