"""The two Triton templates of the lowering: sources from jinja/, grids, choice among tiles.

The templates hold no arithmetic: they import the tiles that the eager kernels call, too.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

from ..compat_inductor import select_algorithm
from . import tiles

# One parameter of the grid function per dimension of the output, then the meta arguments.
Grid = tuple[Any, Any, int]


@SymbolicGridFn
def _grid(rows: Any, width: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> Grid:
    """Return as many programs as any routing of so many contributions can need."""
    bound = tiles.tile_bound(rows, meta["EXPERTS"], meta["BLOCK_M"], minimum=min, cdiv=cdiv)
    return (bound * cdiv(width, meta["BLOCK_N"]), 1, 1)


@functools.cache
def template(name: str) -> TritonTemplate:
    """Load a template once a process: a second one of the same name is an error to Inductor."""
    source = importlib.resources.files(__package__) / "jinja" / f"{name}.py.jinja"
    return TritonTemplate(name=f"int8moe_{name}", grid=_grid, source=source.read_text())


def product(
    name: str,
    inputs: Sequence[ir.IRNode],
    size: Sequence[sympy.Expr | int],
    dtype: torch.dtype,
    candidates: Sequence[tiles.Tile],
    meta: dict[str, Any],
    input_gen_fns: dict[int, Callable[[ir.Buffer], torch.Tensor]],
) -> ir.TensorBox:
    """Return the output [rows, width] of a template; several candidates are compared by time."""
    layout = ir.FixedLayout(
        inputs[0].get_device_or_error(), dtype, list(size), [size[1], sympy.Integer(1)]
    )
    choices: list[Any] = []
    for tile in candidates:
        error = template(name).maybe_append_choice(
            choices,
            input_nodes=list(inputs),
            layout=layout,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
            EVEN_K=meta["DEPTH"] % tile.block_k == 0,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            GROUP_M=tile.group_m,
            **meta,
        )
        if error is not None:
            raise error
    output: ir.TensorBox = select_algorithm(
        f"int8moe_{name}", choices, list(inputs), layout, input_gen_fns=input_gen_fns
    )
    return output
