"""Launch the products of wgmma_kernels.py, which graphs call as operators.

T tokens, H hidden, I intermediate, E local experts, K experts per token. Inductor holds the text of
a user's Triton kernels and compiles it; Gluon it does not know, so a graph calls int8moe::_wgmma_up
and _wgmma_down, of which these are the kernels. Eager calls take the same way.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import launches, tiles, variant_layers, wgmma_kernels
from .eager import device_of, scale_columns
from .tiles import Tile

# Codes lie in shared memory in rows of 128 bytes, in the order that the tensor cores read.
SWIZZLE_BYTES: Final = 128


def first_product(host: Any, plan: Any, rows: Any, tile: Tile) -> Any:
    """Launch the first product; returns its result [T*K, I] by position: codes by a given scale."""
    call = host.call
    values, scale, is_per_row = rows
    tokens, top_k = host.size(call.topk_ids)
    experts, w_rows, _ = host.size(call.w13)
    width = w_rows // 2 if call.gated else w_rows
    is_static = call.activation_quant == "static"
    out = host.empty(tokens * top_k, width, dtype=torch.int8 if is_static else host.dtype)
    host.operate(
        torch.ops.int8moe._wgmma_up.default,
        out,
        values,
        scale,
        call.w13,
        *variant_layers.scale_and_bias(host, "w13"),
        plan.tiles,
        call.a2_scale if is_static else None,
        is_per_row,
        str(host.dtype).removeprefix("torch."),
        call.activation,
        float(call.alpha),
        float(call.beta),
        None if call.limit is None else float(call.limit),
        call.gated,
        host.is_early,
        variant_layers.programs_of(host, tokens * top_k, experts, width, tile),
        _numbers(tile),
    )
    return out


def second_product(
    host: Any, plan: Any, codes: Any, scale: Any, is_per_row: bool, tile: Tile
) -> Any:
    """Launch the second product; returns [T*K, H] by contribution."""
    call = host.call
    tokens, top_k = host.size(call.topk_ids)
    experts, width, _ = host.size(call.w2)
    parts = host.empty(tokens * top_k, width, dtype=host.dtype)
    host.operate(
        torch.ops.int8moe._wgmma_down.default,
        parts,
        codes,
        scale,
        call.w2,
        *variant_layers.scale_and_bias(host, "w2"),
        plan.tiles,
        plan.order,
        call.topk_weights,
        is_per_row,
        not call.apply_router_weight_on_input,
        host.is_early,
        host.is_old(call.w2),
        variant_layers.programs_of(host, tokens * top_k, experts, width, tile),
        _numbers(tile),
    )
    return parts


def _numbers(tile: Tile) -> list[int]:
    """Return a tile as an operator takes it, in the order of _blocks."""
    parts = 2 if tile.has_tail else 1
    rows = [tile.block_m, tile.block_n, tile.block_k, tile.group_m]
    return [*rows, parts, tile.num_warps, tile.num_stages]


def _blocks(numbers: list[int]) -> dict[str, int]:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "PARTS", "num_warps", "STAGES")
    return dict(zip(names, numbers, strict=True))


def timing(is_early: bool) -> dict[str, bool]:
    """Return the options of a launch that may start before the kernel ahead has ended."""
    return {"PDL": True, "launch_pdl": True} if is_early else {"PDL": False}


def described(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Return the descriptor of codes, read in blocks."""
    layout = gl.NVMMASharedLayout(SWIZZLE_BYTES, element_bitwidth=8, rank=len(block))
    return TensorDescriptor.from_tensor(x, block, layout)


def _operands(
    out: Tensor, rows: Tensor, w: Tensor, panels: int, blocks: dict[str, int]
) -> dict[str, Any]:
    """Return the descriptors of rows [T*K, depth] and weights [E * panels, width, depth]."""
    depth, block_k = w.shape[2], blocks["BLOCK_K"]
    w = w.view(-1, w.shape[1] // panels, depth)
    wanted = (len(rows), depth), (len(rows), w.shape[1])
    if (tuple(rows.shape), tuple(out.shape)) != wanted:
        found = tuple(rows.shape), tuple(out.shape)
        raise ValueError(f"rows, out: wanted the shapes {wanted}, got {found}")
    return {
        "a": described(rows, [blocks["BLOCK_M"], block_k]),
        "w": described(w, [panels, blocks["BLOCK_N"], block_k]),
        "steps": tiles.ceil_div(depth, block_k),
        "width": w.shape[1],
        "EVEN_N": w.shape[1] % blocks["BLOCK_N"] == 0,
    }


# Where no program was due: what kernels are compiled for, and the addresses of their weights.
_prepared: set[tuple[Any, ...]] = set()


def is_idle(programs: int, w: Tensor, *kind: Any) -> bool:
    """Say whether nothing is to be done: no program is due, and not for the first time.

    A graph of any size calls what it does not want now, for which it should wait no longer than
    it must, and may be recorded when it does. kind: all that a kernel is compiled for, beside its
    weights.
    """
    if programs > 0:
        return False
    key = (w.data_ptr(), w.shape, *kind)
    was_prepared = key in _prepared
    _prepared.add(key)
    return was_prepared


def launch_or_prepare(kernel: Any, programs: int, **arguments: Any) -> None:
    """Launch a kernel; where no program is due, have it compiled and loaded."""
    if programs > 0:
        launches.launch(kernel, programs, **arguments)
    else:
        kernel.run(grid=(1,), warmup=True, **arguments).run  # noqa: B018 - the property loads it


def launch_up(
    out: Tensor,
    rows: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    tile_list: Tensor,
    code_scale: Tensor | None,
    is_per_row: bool,
    dtype: str,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    gated: bool,
    is_early: bool,
    programs: int,
    tile: list[int],
) -> None:
    """Write the first product of rows [T*K, H] in expert order into out [T*K, I].

    scale: one for each row if is_per_row, else one. dtype: what the result is rounded to, before
    code_scale quantises it. programs: how many to launch. tile: as _numbers has it.
    """
    gate = (activation, alpha, beta, limit, gated)
    given = (bias is None, code_scale is None, is_per_row, dtype, w_scale.shape)
    if is_idle(programs, w, "up", is_early, *gate, *given, *tile):
        return
    blocks = _blocks(tile)
    with device_of(out):
        launch_or_prepare(
            wgmma_kernels.wgmma_up_kernel,
            programs,
            out_ptr=out,
            code_scale_ptr=code_scale,
            a_scale_ptr=scale,
            w_scale_ptr=w_scale,
            bias_ptr=bias,
            tiles_ptr=tile_list,
            **_operands(out, rows, w, 2 if gated else 1, blocks),
            ALPHA=alpha,
            BETA=beta,
            LIMIT=0.0 if limit is None else limit,
            ACTIVATION=activation,
            GATED=gated,
            HAS_BIAS=bias is not None,
            HAS_LIMIT=limit is not None,
            HAS_ROW_SCALE=is_per_row,
            SCALE_COLUMNS=scale_columns(w_scale.shape[1], w.shape[1]),
            DTYPE=dtype,
            IS_STATIC=code_scale is not None,
            **timing(is_early),
            **blocks,
        )


def launch_down(
    out: Tensor,
    rows: Tensor,
    scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    tile_list: Tensor,
    order: Tensor,
    topk_weights: Tensor,
    is_per_row: bool,
    is_weighted: bool,
    is_early: bool,
    is_old: bool,
    programs: int,
    tile: list[int],
) -> None:
    """Write the second product of rows [T*K, I] by position into out [T*K, H] by contribution."""
    given = (bias is None, is_per_row, is_weighted, out.dtype, w_scale.shape, topk_weights.dtype)
    if is_idle(programs, w, "down", is_early, is_old, *given, *tile):
        return
    blocks = _blocks(tile)
    stride_rt, stride_rk = topk_weights.stride()
    with device_of(out):
        launch_or_prepare(
            wgmma_kernels.wgmma_down_kernel,
            programs,
            out_ptr=out,
            a_scale_ptr=scale,
            w_scale_ptr=w_scale,
            bias_ptr=bias,
            weights_ptr=topk_weights,
            order_ptr=order,
            tiles_ptr=tile_list,
            **_operands(out, rows, w, 1, blocks),
            stride_rt=stride_rt,
            stride_rk=stride_rk,
            TOP_K=topk_weights.shape[1],
            HAS_BIAS=bias is not None,
            HAS_ROUTER_WEIGHT=is_weighted,
            HAS_ROW_SCALE=is_per_row,
            SCALE_COLUMNS=scale_columns(w_scale.shape[1], w.shape[1]),
            IS_OLD=is_old,
            **timing(is_early),
            **blocks,
        )
