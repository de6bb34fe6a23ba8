"""Weight-only layers of one token on a GPU: sums on the tensor cores, beside the reference."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support import EXPERTS, Problem, assert_close, problem, with_scheme

from int8moe_compile.lowerings import eager, eager_variants, variants
from int8moe_compile.lowerings.decode_products import row_sums
from int8moe_compile.ops.arguments import ExpertsArguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Small and large experts; depths that blocks of 256 and 512 codes divide, and that they do not.
SIZES = [
    {"H": 512, "I": 256, "E": 8, "K": 8},
    {"H": 272, "I": 1040, "E": 8, "K": 3},
    {"H": 4096, "I": 1536, "E": 3, "K": 2},
    {"H": 2064, "I": 2880, "E": 6, "K": 4},
    {"H": 2880, "I": 2048, "E": 9, "K": 8},
    {"H": 16, "I": 32, "E": 4, "K": 1},
    {"H": 4096, "I": 1536, "E": 3, "K": 1},
    {"H": 2048, "I": 4096, "E": 4, "K": 3, "gated": False},
]


def decoded(case: Problem) -> torch.Tensor:
    """Return the output of a case by "decode", which is to take it."""
    call = ExpertsArguments(*case.args, **case.options)
    variant = variants.decode_variant(*eager.layer_products(call))
    assert variant is not None
    out = eager_variants.experts(call, variant)
    assert out is not None
    return out


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 3])
def test_sums_of_all_depths(sizes: dict[str, int], dtype: torch.dtype, T: int) -> None:
    torch.manual_seed(T)
    case = with_scheme(problem(T, T=T, dtype=dtype, **sizes), "none")
    ids = case.topk_ids.clone()
    if sizes["K"] > 1:
        ids[-1, 1] = -1
    case = case.with_(topk_ids=ids)
    assert_close(decoded(case.to("cuda")), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_words_cannot_read_give_what_others_give(dtype: torch.dtype) -> None:
    """Tokens that do not begin at a multiple of 16 bytes: eager, and from inside of a graph."""
    case = with_scheme(problem(1, T=1, H=512, I=384, E=8, K=2, dtype=dtype), "none")
    there = case.to("cuda")
    flat = torch.zeros(513, dtype=dtype, device="cuda")
    flat[1:] = there.hidden_states.flatten()
    moved = there.with_(hidden_states=flat[1:].view(1, 512))
    assert moved.hidden_states.data_ptr() % 16 != 0
    assert_close(decoded(moved), case)
    assert_close(moved.run(), case)

    def layer(flat: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return EXPERTS(flat[1:].view(1, 512), *rest, **there.options)

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(layer, fullgraph=True)(flat, *there.args[1:])
    assert_close(out, case)


@triton.jit
def sums_kernel(out_ptr, a_ptr, w_ptr, depth, R: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Sums [R, N] of rows [R, depth] of floats and [R, N, depth] of codes, by one program."""
    row, column = tl.arange(0, R), tl.arange(0, N)
    w_rows = w_ptr + (row[:, None] * N + column[None, :]) * depth
    a_rows = (a_ptr + row * depth)[:, None, None]
    is_live = (row >= 0)[:, None, None]
    sums = row_sums(
        a_rows, w_rows[:, :, None], is_live, depth, False, True, True, True, K, True, False
    )
    tl.store(out_ptr + row[:, None] * N + column[None, :], sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "depth", "warps"), [(2, 256, 4), (1, 256, 1)])
def test_rows_that_are_not_finite_stay_by_themselves(
    columns: int, depth: int, warps: int, dtype: torch.dtype
) -> None:
    """The tensor cores multiply all lanes' operands: other rows' sums are to see none of it."""
    torch.manual_seed(0)
    rows = torch.randn(8, 512, device="cuda").to(dtype)
    rows[3, 7], rows[5, 300] = float("inf"), float("nan")
    codes = torch.randint(-127, 128, (8, columns, 512), device="cuda", dtype=torch.int8)
    out = torch.empty(8, columns, device="cuda")
    sums_kernel[(1,)](out, rows, codes, 512, R=8, N=columns, K=depth, num_warps=warps)
    expected = (rows.double()[:, None, :] * codes.double()).sum(2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-2, equal_nan=True)
    assert not out[5].isfinite().any() and out[[0, 1, 2, 4, 6, 7]].isfinite().all()
