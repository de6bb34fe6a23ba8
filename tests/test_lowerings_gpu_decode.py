"""Weight-only layers of one token on a GPU: sums on the tensor cores, beside the reference."""

from __future__ import annotations

import pytest
import torch
from support import EXPERTS, Problem, assert_close, problem, with_scheme

from int8moe_compile.lowerings import eager, eager_variants, variants
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


def test_rows_that_are_not_finite_stay_by_themselves() -> None:
    """The tensor cores multiply all lanes' operands: other rows' sums are to see none of it."""
    case = with_scheme(problem(2, T=2, H=512, I=384, E=8, K=2), "none")
    rows = case.hidden_states.clone()
    rows[1, 7] = float("inf")
    rows[1, 300] = float("nan")
    ids = torch.tensor([[0, 1], [2, 3]])
    plain = decoded(case.with_(topk_ids=ids).to("cuda"))
    out = decoded(case.with_(hidden_states=rows, topk_ids=ids).to("cuda"))
    assert torch.equal(out[0], plain[0])
    assert out[1].isnan().all()
