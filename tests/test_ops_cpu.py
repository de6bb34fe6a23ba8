"""Hold the CPU kernel to the reference, to itself in any batch, and to its inputs' storage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import Problem, assert_as_reference, assert_close, poison, problem, with_scheme
from torch import Tensor

from int8moe_compile.compat import cpu_matmul_rounds_inputs

WORDS = ("token", "tensor", "static", "none")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh", "out_dtype": torch.float32},
    "relu": {"activation": "relu", "limit": 1.0},
    "relu2": {"activation": "relu2", "beta": 0.5},
    "gpt_oss": {"alpha": 1.702, "beta": 1.0, "limit": 7.0},
    "not_gated": {"gated": False, "activation": "relu2"},
    "not_gated_silu": {"gated": False, "alpha": 1.5},
}


def build(name: str, word: str, granularity: str = "channel", **sizes: Any) -> Problem:
    options = OPTIONS[name]
    if granularity == "halves" and not options.get("gated", True):
        granularity = "tensor"
    return with_scheme(problem(7, **sizes, **options), word, granularity)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_kernel_is_the_reference(name: str, word: str) -> None:
    for granularity in ("channel", "tensor", "halves"):
        assert_as_reference(build(name, word, granularity, T=9, H=40, I=24, E=5, K=3))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_is_the_reference_for_every_dtype(dtype: torch.dtype, word: str) -> None:
    g = torch.Generator().manual_seed(3)
    for out_dtype in DTYPES:
        case = build("plain", word, T=6, dtype=dtype).with_(
            w13_bias=torch.randn(4, 64, generator=g).to(dtype),
            w2_bias=torch.randn(4, 64, generator=g).to(out_dtype),
            out_dtype=out_dtype,
        )
        assert_as_reference(case)


@pytest.mark.parametrize("word", ["token", "tensor", "static"])
def test_int8_rows_equal_the_float_rows_they_code(word: str) -> None:
    case = with_scheme(problem(12, T=7), word)
    x = case.hidden_states.float()
    if word == "static":
        scale = case.options["a13_scale"]
    else:
        scale = x.abs().amax(-1, keepdim=True) if word == "token" else x.abs().amax()
        scale = scale / torch.full_like(scale, 127)
    codes = torch.round(x / scale).clamp(-128, 127).to(torch.int8)
    coded = case.with_(hidden_states=codes, a13_scale=scale)
    assert torch.equal(coded.run(), case.run())
    assert_as_reference(coded)


@pytest.mark.parametrize("word", WORDS)
def test_router_weight_on_input_is_the_weighted_input(word: str) -> None:
    case = with_scheme(problem(13, T=6, K=1, dtype=torch.float32), word)
    weighted = case.with_(
        hidden_states=case.hidden_states * case.topk_weights,
        topk_weights=torch.ones_like(case.topk_weights),
    )
    assert torch.equal(case.with_(apply_router_weight_on_input=True).run(), weighted.run())
    assert_as_reference(case.with_(apply_router_weight_on_input=True))


@pytest.mark.parametrize("name", ["plain", "gelu", "gelu_tanh", "gpt_oss", "not_gated_silu"])
@pytest.mark.parametrize("word", ["token", "static"])
def test_a_row_depends_on_itself_only(name: str, word: str) -> None:
    case = build(name, word, T=1000, I=29, K=3, dtype=torch.float32)
    whole = case.run()
    g = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 16, 17, 64, 128, 1000):
        chosen = torch.randperm(1000, generator=g)[:tokens]
        assert torch.equal(case.rows(chosen).run(), whole[chosen])
        assert torch.equal(case.rows(slice(0, tokens)).run()[0], whole[0])


def test_tensor_scales_depend_on_the_batch() -> None:
    # documented exemption: the scale is everybody's. If this fails, the exemption can go.
    case = with_scheme(problem(3, T=64), "tensor")
    assert not torch.equal(case.rows(slice(0, 1)).run()[0], case.run()[0])


@pytest.mark.parametrize("word", ["token", "tensor", "static"])
def test_threads_and_chunks_leave_bits_alone(word: str) -> None:
    case = with_scheme(problem(4, T=40, H=2100, I=1050, E=2, dtype=torch.float32), word)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(case.run())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    assert_as_reference(case)


@pytest.mark.parametrize("word", WORDS)
def test_settings_of_the_process_leave_bits_alone(word: str) -> None:
    """Autocast, reduced matmul precision, default device and determinism are the caller's."""
    case = with_scheme(problem(5, dtype=torch.float16, T=9), word)
    wanted = case.run()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.run(), wanted)
    with torch.device("meta"):
        assert torch.equal(case.run(), wanted)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(case.run(), wanted)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("medium")
    try:
        assert cpu_matmul_rounds_inputs()
        assert_as_reference(case)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not cpu_matmul_rounds_inputs()


def test_reduced_precision_is_seen_through_either_setting() -> None:
    # torch.get_float32_matmul_precision() raises once the newer setting was used
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    case = with_scheme(problem(5, dtype=torch.float32, T=9), "none")
    try:
        matmul.fp32_precision = "bf16"
        assert cpu_matmul_rounds_inputs()
        # in fp64, so nothing is lost before the one rounding
        assert_close(case.run(), case)
    finally:
        matmul.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def spread(weight: Tensor, fill: int = 127) -> Tensor:
    """Return the same codes in rows followed by 5 bytes of fill, for reads beyond a row."""
    wider = weight.new_full((*weight.shape[:-1], weight.shape[-1] + 5), fill)
    wider[..., : weight.shape[-1]] = weight
    return wider[..., : weight.shape[-1]]


def strided_rows(x: Tensor) -> dict[str, Tensor]:
    tokens, hidden = x.shape
    every_second = x.new_full((tokens, 2 * hidden), math.nan)
    every_second[:, ::2] = x
    wide = x.new_full((tokens, hidden + 3), math.nan)
    wide[:, :hidden] = x
    return {
        "transposed": x.t().contiguous().t(),
        "every second": every_second[:, ::2],
        "wide": wide[:, :hidden],
        "reversed batch": x.flip(0)[torch.arange(tokens - 1, -1, -1)],
    }


@pytest.mark.parametrize("word", WORDS)
def test_strides_of_inputs_do_not_matter(word: str) -> None:
    case = with_scheme(problem(6, T=5, H=33, I=18, dtype=torch.float32), word)
    wanted = case.run()
    for name, rows in strided_rows(case.hidden_states).items():
        assert torch.equal(case.with_(hidden_states=rows).run(), wanted), name
    others = case.with_(
        w13=spread(case.w13),
        w2=spread(case.w2),
        w13_scale=case.w13_scale.t().contiguous().t(),
        topk_weights=case.topk_weights.t().contiguous().t(),
        topk_ids=case.topk_ids.t().contiguous().t(),
    )
    assert torch.equal(others.run(), wanted)
    one = case.with_(hidden_states=case.hidden_states[:1].expand(5, 33))
    assert torch.equal(one.run(), one.with_(hidden_states=one.hidden_states.contiguous()).run())
    same = case.with_(w13=case.w13[:1].expand(4, -1, -1))
    assert torch.equal(same.run(), same.with_(w13=same.w13.contiguous()).run())


def test_every_input_is_untouched_and_the_result_is_fresh() -> None:
    g = torch.Generator().manual_seed(2)
    for tokens, ids, out_dtype in ((0, 0, None), (1, 1, None), (4, -1, None), (4, 2, torch.half)):
        case = problem(8, T=tokens).with_(
            w13_bias=torch.randn(4, 64, generator=g),
            w2_bias=torch.randn(4, 64, generator=g),
            expert_map=torch.tensor([2, 0, -1, 1]),
            out_dtype=out_dtype,
        )
        case = case.with_(topk_ids=torch.full((tokens, 2), ids))
        tensors = [*case.args, *(v for v in case.options.values() if isinstance(v, Tensor))]
        copies = [tensor.clone() for tensor in tensors]
        out = case.run()
        assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}
        assert out.untyped_storage().data_ptr() not in storages
        assert out.dtype == (out_dtype or torch.bfloat16)


@pytest.mark.parametrize("word", WORDS)
def test_nothing_to_do_gives_zeros(word: str) -> None:
    case = with_scheme(problem(9, T=4), word)
    for empty in (
        case.rows(slice(0, 0)),
        case.with_(topk_ids=torch.full((4, 2), -1)),
        case.with_(topk_ids=torch.full((4, 2), 4, dtype=torch.int32)),
        case.with_(topk_ids=case.topk_ids[:, :0], topk_weights=case.topk_weights[:, :0]),
        case.with_(w13=case.w13[:0], w13_scale=case.w13_scale[:0]).with_(
            w2=case.w2[:0], w2_scale=case.w2_scale[:0]
        ),
    ):
        out = empty.run()
        assert out.shape == empty.hidden_states.shape and out.dtype == torch.bfloat16
        assert out.stride() == (64, 1)
        assert torch.count_nonzero(out) == 0
        assert torch.equal(out, empty.reference())


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 10, 13])
def test_slots_are_summed_in_order(top_k: int) -> None:
    case = problem(10, T=6, E=3, K=top_k, dtype=torch.float32, activation_quant="token")
    assert_as_reference(case)
    # one slot at a time, added up by hand: the pinned order, whatever the kernel's grouping
    total = torch.zeros(6, 64)
    for slot in range(top_k):
        part = case.with_(
            topk_ids=case.topk_ids[:, slot : slot + 1],
            topk_weights=case.topk_weights[:, slot : slot + 1],
        )
        total = total + part.run()
    assert torch.equal(total, case.run())


@pytest.mark.parametrize("experts", [1, 3, 60, 64, 160, 256, 512, 1024, 2048])
def test_any_number_of_experts(experts: int) -> None:
    case = problem(14, T=7, H=64, I=32, E=experts)
    apart = torch.arange(7)[:, None].expand(7, 2) * 3 % experts
    for ids in (apart, torch.full((7, 2), experts - 1)):
        assert_as_reference(case.with_(topk_ids=ids, activation_quant="token"))


def test_square_shapes_use_the_right_axis() -> None:
    # N == E == H: a scale or bias indexed on the wrong axis would still have a legal shape
    g = torch.Generator().manual_seed(4)
    case = problem(15, T=8, H=6, I=3, E=6).with_(
        w13_bias=torch.randn(6, 6, generator=g), w2_bias=torch.randn(6, 6, generator=g)
    )
    assert_close(case.run(), case)
    for other in (case.with_(w13_scale=case.w13_scale.t()), case.with_(w2_scale=case.w2_scale.t())):
        assert not torch.equal(other.run(), case.run())


@pytest.mark.parametrize("hidden, intermediate", [(16, 17), (33, 48), (704, 352), (2816, 80)])
@pytest.mark.parametrize("word", ["token", "none"])
def test_odd_sizes_with_poisoned_rows(word: str, hidden: int, intermediate: int) -> None:
    case = with_scheme(problem(16, T=9, H=hidden, I=intermediate), word)
    assert_as_reference(case.with_(w13=spread(case.w13), w2=spread(case.w2)))


def test_skipped_slots_never_show_recycled_memory() -> None:
    ids = torch.tensor([[3, -1, 3, -1]]).repeat(64, 1)
    case = problem(4, T=64, H=32, I=24, E=8, K=4).with_(topk_ids=ids)
    first = case.run()
    assert torch.isfinite(first).all()
    assert_as_reference(case)
    for _ in range(20):
        poison((64, 4, 32), (256, 24), (256, 48), (64, 32))
        assert torch.equal(case.run(), first)
