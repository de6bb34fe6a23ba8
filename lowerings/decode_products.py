"""Products along whole rows of an expert's weights, which a warp or a few share.

Codes come as words of four. Beside codes dp4a multiplies and adds a pair of words in one
instruction, and sums are exact. Beside floats the tensor cores add, where there are any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent_launch import let_next_start, wait_for_earlier
from .tile_math import code_unit, codes_to_float


@triton.jit
def word_pointer(ptr: tl.tensor) -> tl.tensor:
    """Return pointers to codes as pointers to words of four."""
    return ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def word_products(a: tl.tensor, w: tl.tensor, DOT4: tl.constexpr) -> tl.tensor:
    """Return the int32 sums of products of the four codes in each pair of words."""
    if DOT4:
        return tl.inline_asm_elementwise(
            asm="dp4a.s32.s32 $0, $1, $2, 0;",
            constraints="=r,r,r",
            args=[a, w],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        total = ((a << 24) >> 24) * ((w << 24) >> 24)
        total += ((a << 16) >> 24) * ((w << 16) >> 24)
        total += ((a << 8) >> 24) * ((w << 8) >> 24)
        return total + (a >> 24) * (w >> 24)


@triton.jit
def add_words(w: tl.tensor, a: tl.tensor, sums: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return fp32 sums plus products of codes and floats of a dtype, for diagonal_sums.

    w: words of four codes, a: of four floats, all in the same threads, by two, and such that each
    four lanes from a multiple of four on hold words of one row: its products are added there
    (tests read the layouts of the tiles in decode_tiles.py).

    One instruction of the tensor cores multiplies matrices [16, 16] and [16, 8]; four lanes hold
    one of its upper rows, one of its lower ones, and a column. Here each lane gives eight codes of
    its own, half of them to either row, and four floats: then, again with all codes, the other
    four. On the diagonal of the upper rows, then of the lower ones, are sums of products of a
    lane's own operands; all else is left. So two instructions add what takes eight beside floats
    that are converted to fp32, and codes need to become bf16 or fp16 only, as in codes_to_float.
    """
    tl.static_assert((dtype == tl.bfloat16) or (dtype == tl.float16), "neither bf16 nor fp16")
    CONVERT: tl.constexpr = (
        """
            prmt.b32 w1, first, 0x64646464, 0x4140;
            prmt.b32 w2, first, 0x64646464, 0x4342;
            prmt.b32 w3, second, 0x64646464, 0x4140;
            prmt.b32 w4, second, 0x64646464, 0x4342;
            mov.b32 offset, 0x64806480;
            sub.rn.f16x2 w1, w1, offset;
            sub.rn.f16x2 w2, w2, offset;
            sub.rn.f16x2 w3, w3, offset;
            sub.rn.f16x2 w4, w4, offset;
        """
        if dtype == tl.float16
        else """
            prmt.b32 w1, first, 0, 0x4140;
            prmt.b32 w2, first, 0, 0x4342;
            prmt.b32 w3, second, 0, 0x4140;
            prmt.b32 w4, second, 0, 0x4342;
            mov.b32 factor, 0x7F007F00;
            mov.b32 offset, 0xC000C000;
            fma.rn.bf16x2 w1, w1, factor, offset;
            fma.rn.bf16x2 w2, w2, factor, offset;
            fma.rn.bf16x2 w3, w3, factor, offset;
            fma.rn.bf16x2 w4, w4, factor, offset;
        """
    )
    MULTIPLY: tl.constexpr = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        if dtype == tl.float16
        else "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    )
    return tl.inline_asm_elementwise(
        asm="""
        {
            .reg .b32 first, second, w1, w2, w3, w4, a1, a2, a3, a4;
            .reg .b32 factor, offset;
            .reg .f32 even, odd, left, right, next_even, next_odd, zero;
            xor.b32 first, $2, 0x80808080;
            xor.b32 second, $3, 0x80808080;
            mov.b64 {a1, a2}, $4;
            mov.b64 {a3, a4}, $5;
        """
        + CONVERT
        + """
            mov.f32 zero, 0f00000000;
        """
        + MULTIPLY
        + """ {even, odd, left, right}, {w1, w3, w2, w4}, {a1, a2}, {$6, $7, zero, zero};
        """
        + MULTIPLY
        + """ {left, right, next_even, next_odd}, {w1, w3, w2, w4}, {a3, a4},
                {zero, zero, zero, zero};
            add.f32 $0, even, next_even;
            add.f32 $1, odd, next_odd;
        }
        """,
        constraints="=f,=f,r,r,l,l,f,f",
        args=[w, a, sums],
        dtype=tl.float32,
        is_pure=False,
        pack=2,
    )


@triton.jit
def diagonal_sums(sums: tl.tensor) -> tl.tensor:
    """Return of the sums of add_words those on the diagonals, and zeros else."""
    return tl.inline_asm_elementwise(
        asm="""
        {
            .reg .b32 lane, row, column;
            .reg .f32 sum;
            .reg .pred is_odd, is_mine;
            mov.u32 lane, %laneid;
            shr.u32 row, lane, 3;
            and.b32 column, lane, 3;
            setp.eq.u32 is_mine, row, column;
            and.b32 lane, lane, 4;
            setp.ne.u32 is_odd, lane, 0;
            selp.f32 sum, $3, $2, is_odd;
            selp.f32 $0, sum, 0f00000000, is_mine;
            mov.f32 $1, 0f00000000;
        }
        """,
        constraints="=f,=f,f,f",
        args=[sums],
        dtype=tl.float32,
        is_pure=False,
        pack=2,
    )


@triton.jit
def load_words(
    pointers, is_live, word, depth, EVEN_K: tl.constexpr, POLICY: tl.constexpr
) -> tl.tensor:
    """Return words of four from some on; zeros past the depth, whatever there is in dead rows."""
    if EVEN_K:
        return tl.load(pointers, is_live, eviction_policy=POLICY)
    else:
        return tl.load(pointers, is_live & (word < depth // 4), other=0, eviction_policy=POLICY)


@triton.jit
def row_sums(
    a_rows,  # [R, 1, 1] pointers to codes, or to floats
    w_rows,  # [R, N, 1] pointers to codes
    is_live,  # [R, 1, 1], or a scalar
    depth,
    INTEGER: tl.constexpr,
    DOT4: tl.constexpr,
    PACKED: tl.constexpr,  # not INTEGER: see codes_to_float
    TENSOR_CORES: tl.constexpr,  # PACKED: see add_words
    BLOCK_K: tl.constexpr,  # a whole row, or with TENSOR_CORES part of one
    EVEN_K: tl.constexpr,  # BLOCK_K divides the depth
    PDL: tl.constexpr,
) -> tl.tensor:
    """Return the sums [R, N] of products along whole rows: exact in int32, or in fp32.

    The weights, or the first that TENSOR_CORES take at a time, are on their way when the wait for
    the kernels ahead, which write a, begins.
    """
    if INTEGER:
        word = tl.arange(0, BLOCK_K // 4)[None, None, :]
        mask = is_live & (word < depth // 4)
        w = tl.load(word_pointer(w_rows) + word, mask, other=0, eviction_policy="evict_first")
        wait_for_earlier(PDL)
        let_next_start(PDL)
        a = tl.load(word_pointer(a_rows) + word, mask, other=0)
        return tl.sum(word_products(a, w, DOT4), axis=2)
    elif TENSOR_CORES:
        word = tl.arange(0, BLOCK_K // 4)[None, None, :]
        # Both by two, as many as of a in 16 bytes, so that they lie in the same threads.
        w_words = tl.max_contiguous(word_pointer(w_rows) + word, (1, 1, 2))
        w_words = tl.multiple_of(w_words, (1, 1, 8))
        a_words = a_rows.to(tl.pointer_type(tl.int64)) + word
        a_words = tl.multiple_of(tl.max_contiguous(a_words, (1, 1, 2)), (1, 1, 16))
        dtype: tl.constexpr = a_rows.dtype.element_ty
        w = load_words(w_words, is_live, word, depth, EVEN_K, "evict_first")
        wait_for_earlier(PDL)
        let_next_start(PDL)
        sums = tl.zeros(w.shape, tl.float32)
        for start in range(BLOCK_K // 4, depth // 4, BLOCK_K // 4):
            at = start + word
            next_w = load_words(w_words + start, is_live, at, depth, EVEN_K, "evict_first")
            a = load_words(a_words, is_live, at - BLOCK_K // 4, depth, EVEN_K, "")
            sums = add_words(w, a, sums, dtype)
            w = next_w
            a_words += BLOCK_K // 4
        last = (depth - 1) // BLOCK_K * (BLOCK_K // 4) + word
        a = load_words(a_words, is_live, last, depth, EVEN_K, "")
        sums = add_words(w, a, sums, dtype)
        return tl.sum(diagonal_sums(sums), axis=2) * code_unit(dtype, True)
    else:
        k = tl.arange(0, BLOCK_K)[None, None, :]
        mask = is_live & (k < depth)
        # By eight, as many as of a in 16 bytes: with 16 the floats of w would change threads.
        w_ptrs = tl.multiple_of(w_rows + k, (1, 1, 8))
        w = tl.load(w_ptrs, mask, other=0, eviction_policy="evict_first")
        wait_for_earlier(PDL)
        let_next_start(PDL)
        a = tl.load(a_rows + k, mask, other=0.0)
        floats = codes_to_float(w, a.dtype, PACKED).to(tl.float32)
        sums = tl.sum(a.to(tl.float32) * floats, axis=2)
        return sums * code_unit(a.dtype, PACKED)
