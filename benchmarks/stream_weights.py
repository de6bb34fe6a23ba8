"""Stream a layer's weights through rings of buffers by TMA, without products: what reading takes.

A program takes every num_programs-th block of rows over their whole depth, as asynchronous products
do (lowerings/wgmma_tiles.py). H200s, Triton 3.6 and 3.7.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from shapes import shape_named
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Rows of a box, codes of its rows, boxes side by side asked for at once, stages, programs resident.
RINGS = ((128, 128, 1, 3, 2), (128, 128, 2, 3, 2), (64, 128, 2, 6, 2), (64, 128, 1, 12, 2))


@gluon.jit
def ask(w, buffers, barriers, slot, step, steps, BOXES: gl.constexpr, ROWS: gl.constexpr, BLOCK_K):
    """Ask for one step of a program's sequence: some boxes of one block of rows."""
    block = gl.program_id(0) + step // steps * gl.num_programs(0)
    barrier = barriers.index(slot)
    mbarrier.expect(barrier, BOXES * ROWS * BLOCK_K)
    for box in gl.static_range(BOXES):
        corner = [block * ROWS, (step % steps * BOXES + box) * BLOCK_K]
        tma.async_copy_global_to_shared(w, corner, barrier, buffers.index(slot * BOXES + box))


@gluon.jit
def stream_kernel(
    w,  # descriptor of [rows, depth] codes, by [ROWS, BLOCK_K]
    blocks,  # of rows
    steps,  # of the depth
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Read everything once, as many steps ahead as there are buffers."""
    buffers = gl.allocate_shared_memory(gl.int8, [STAGES * BOXES, ROWS, BLOCK_K], w.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(barriers.index(slot), count=1)
    fence_async_shared()
    total = gl.cdiv(blocks - gl.program_id(0), gl.num_programs(0)) * steps
    for slot in gl.static_range(STAGES):
        if slot < total:
            ask(w, buffers, barriers, slot, slot, steps, BOXES, ROWS, BLOCK_K)
    slot = 0
    phase = 0
    for step in range(total):
        mbarrier.wait(barriers.index(slot), phase)
        if step + STAGES < total:
            ask(w, buffers, barriers, slot, step + STAGES, steps, BOXES, ROWS, BLOCK_K)
        phase = phase if slot < STAGES - 1 else phase ^ 1
        slot = slot + 1 if slot < STAGES - 1 else 0


def stream_us(w: torch.Tensor, ring: tuple[int, int, int, int, int]) -> float:
    """Return the median microseconds of reading [rows, depth] codes, L2 flushed before."""
    rows, block_k, boxes, stages, resident = ring
    layout = gl.NVMMASharedLayout(swizzle_byte_width=block_k, element_bitwidth=8, rank=2)
    described = TensorDescriptor.from_tensor(w, [rows, block_k], layout)
    programs = resident * torch.cuda.get_device_properties(w.device).multi_processor_count
    blocks, steps = w.shape[0] // rows, w.shape[1] // (block_k * boxes)

    def run() -> None:
        stream_kernel[(programs,)](
            described,
            blocks,
            steps,
            BOXES=boxes,
            STAGES=stages,
            ROWS=rows,
            BLOCK_K=block_k,
            num_warps=4,
        )

    return 1e3 * float(triton.testing.do_bench(run, warmup=6, rep=30, return_mode="median"))


def main() -> None:
    """Print microseconds and TB/s of both weights of each shape, for each ring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen3,qwen1.5,mixtral")
    options = parser.parse_args()
    for shape in (shape_named(name) for name in options.shapes.split(",")):
        sizes = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        for name, (width, depth) in zip(("w13", "w2"), sizes, strict=True):
            w = torch.empty(shape.experts * width, depth, dtype=torch.int8, device="cuda")
            for ring in RINGS:
                if depth % (ring[1] * ring[2]) == 0:
                    took = stream_us(w, ring)
                    rate = w.numel() / took / 1e6
                    print(f"{shape.name} {name} {ring}: {took:.1f} us, {rate:.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
