"""Programmatic dependent launch: a kernel that starts before the one ahead of it has ended.

CUDA from sm_90 on. A kernel that was launched so may start as soon as every program of the one
ahead has let it (let_next_start) or ended, and sees what earlier kernels wrote once it has waited
(wait_for_earlier). Launches are then hidden, and weights can be read meanwhile.

Every kernel with PDL waits in each of its programs and before its first store, so that who waits
for it waits for everything earlier, too. Both products in one launch alone take tickets of their
tiles' progress before, which the routing has zeroed and nothing between touches.

Second products read the routing before they wait: it is older than the first product, which lets
the next kernel start only after its own wait, and until then nothing behind it starts; asynchronous
ones read their weights, too, if these come from outside of the call or graph (IS_OLD). Both
products in one launch read routing and weights so, behind spread, which waits before it lets them
start. decode's products read weights and ids so, as quantising, launched without this, lies
between. Quantising by token and routing let the next kernel start at once. All of this takes what
was launched early ahead of the call, by whomever, to have waited as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bytes of a line of L2, and the programs of a kernel that are there while it waits.
LINE_BYTES = tl.constexpr(128)
FIRST_PROGRAMS = tl.constexpr(512)


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Wait until everything that earlier kernels wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start when every program has come so far."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(rows: tl.tensor, depth, LINES: tl.constexpr):
    """Start to bring the first lines of rows of codes, [N] pointers, into L2; a power of two."""
    offset = tl.minimum(tl.arange(0, LINES) * LINE_BYTES, depth - 1)
    address = (rows[:, None] + offset[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        asm="prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        constraints="=r,l",
        args=[address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
