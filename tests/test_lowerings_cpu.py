"""Hold the compiled CPU kernel to the reference where tiles, tails and chunks could go wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from support import Problem, assert_close, poison, probe, problem, with_scheme
from torch import Tensor

from int8moe_compile.lowerings import cpu, cpu_build

if cpu_build.kernel() is None:
    pytest.skip("no C++ compiler: the plain kernel runs, see test_ops_cpu", allow_module_level=True)

WORDS = ("token", "tensor", "static", "none")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def spaced(codes: Tensor, gap: int) -> Tensor:
    """Return the same weight with `gap` bytes of 127 after every row."""
    wide = torch.full((*codes.shape[:-1], codes.shape[-1] + gap), 127, dtype=torch.int8)
    wide[..., : codes.shape[-1]] = codes
    return wide[..., : codes.shape[-1]]


def test_the_packed_call_is_the_struct() -> None:
    library = ctypes.CDLL(str(cpu_build.built()))
    library.int8moe_call_bytes.restype = ctypes.c_int64
    assert library.int8moe_call_bytes() == cpu.LAYOUT.size


@pytest.mark.parametrize("hidden", [1, 3, 16, 33, 35, 80, 160, 192])
@pytest.mark.parametrize("inner", [1, 2, 5, 17, 48, 80, 96])
def test_sizes_and_row_strides(hidden: int, inner: int) -> None:
    case = problem(hidden * inner, T=9, H=hidden, I=inner, E=4, activation="relu")
    case = case.with_(w13=spaced(case.w13, 3), w2=spaced(case.w2, 61))
    for word in ("token", "static"):
        scheme = with_scheme(case, word)
        # relu has one right answer, and every sum is exact
        assert torch.equal(scheme.run(), scheme.reference())
    weight_only = with_scheme(case, "none")
    assert_close(weight_only.run(), weight_only)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("hidden, inner", [(704, 1408), (2816, 352), (2880, 640)])
def test_model_sizes(hidden: int, inner: int, word: str) -> None:
    case = with_scheme(problem(2, T=9, H=hidden, I=inner, E=3), word)
    assert_close(case.run(), case)


@pytest.mark.parametrize("rows", [*range(1, 10), 63, 64, 65, 130])
def test_every_number_of_rows_of_an_expert(rows: int) -> None:
    case = problem(rows, T=rows, H=48, I=36, E=2, K=1, activation="relu2")
    for expert in (0, 1):
        alone = case.with_(topk_ids=torch.full((rows, 1), expert))
        assert torch.equal(alone.run(), alone.reference())
        weight_only = with_scheme(alone, "none")
        whole = weight_only.run()
        assert_close(whole, weight_only)
        # weight-only sums are floating, yet a row's order does not depend on its neighbours
        assert torch.equal(weight_only.rows(slice(rows - 1, rows)).run(), whole[rows - 1 :])


@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize("weight", [-128, 127])
def test_extreme_codes_are_exact(value: int, weight: int) -> None:
    hidden, inner = 520, 40
    out = torch.ops.int8moe.experts(
        torch.full((5, hidden), value, dtype=torch.int8),
        torch.full((1, inner, hidden), weight, dtype=torch.int8),
        torch.ones(1, 1),
        torch.ones(1, hidden, inner, dtype=torch.int8),
        torch.ones(1, 1),
        torch.ones(5, 1),
        torch.zeros(5, 1, dtype=torch.int64),
        activation_quant="static",
        a13_scale=torch.ones(1),
        a2_scale=torch.full((1,), 2.0**17),
        gated=False,
        activation="relu",
        out_dtype=torch.float32,
    )
    h = max(0, value * weight * hidden)
    code = max(-128, min(127, round(h / 2**17)))
    assert torch.equal(out, torch.full((5, hidden), float(code * inner * 2**17)))


@pytest.mark.parametrize("word", WORDS)
def test_threads_and_chunks(word: str, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_scheme(problem(3, T=200, H=96, I=64, E=5, K=3, dtype=torch.float32), word)
    torch.set_num_threads(1)
    wanted = case.run()
    assert_close(wanted, case)
    for count in (2, 3, 7):
        torch.set_num_threads(count)
        for _ in range(5):
            assert torch.equal(case.run(), wanted)
    monkeypatch.setattr(cpu, "SCRATCH_BYTES", 1)
    assert torch.equal(case.run(), wanted)


def test_one_expert_takes_all_of_a_large_batch(threads: None) -> None:
    case = problem(4, T=333, H=160, I=130, E=6, K=2, activation="relu")
    case = case.with_(topk_ids=torch.full((333, 2), 4))
    torch.set_num_threads(2)
    assert torch.equal(case.run(), case.reference())


def strided(case: Problem) -> Problem:
    """Return the same values with strides that nobody would choose."""

    def every_other(tensor: Tensor) -> Tensor:
        wide = torch.full((*tensor.shape, 2), 77, dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]

    return case.with_(
        hidden_states=case.hidden_states.t().contiguous().t(),
        topk_weights=every_other(case.topk_weights),
        topk_ids=case.topk_ids.t().contiguous().t(),
        w13=case.w13.transpose(0, 1).contiguous().transpose(0, 1),
        w13_scale=case.w13_scale.t().contiguous().t(),
        w2_scale=every_other(case.w2_scale),
        w13_bias=every_other(case.options["w13_bias"]),
        w2_bias=case.options["w2_bias"].t().contiguous().t(),
        expert_map=every_other(case.options["expert_map"]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_strides_and_dtypes_of_everything(dtype: torch.dtype, ids: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    case = problem(5, T=11, H=40, I=24, E=4, K=3, dtype=dtype, activation="relu").with_(
        w13_bias=torch.randn(4, 48, generator=g).to(dtype),
        w2_bias=torch.randn(4, 40, generator=g).to(dtype),
        expert_map=torch.tensor([3, -1, 0, 9, 2, 1], dtype=ids),
    )
    case = case.with_(
        topk_ids=torch.randint(-1, 7, (11, 3), generator=g).to(ids),
        topk_weights=case.topk_weights.to(dtype),
    )
    wanted = case.reference()
    assert torch.equal(case.run(), wanted)
    assert torch.equal(strided(case).run(), wanted)


def test_rows_repeated_by_a_zero_stride() -> None:
    case = problem(6, T=7, activation="relu")
    repeated = case.with_(hidden_states=case.hidden_states[:1].expand(7, -1))
    assert torch.equal(repeated.run(), repeated.reference())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_halves(dtype: torch.dtype) -> None:
    """Subnormals, ties and overflow of the output dtype round as torch rounds them."""
    x = torch.arange(-127, 128).float().repeat(3, 1)
    case = probe(x)
    g = torch.Generator().manual_seed(0)
    for size in (1e-9, 1e-7, 3e-6, 1e-2, 1.0, 500.0, 1e6):
        weights = torch.rand(3, 1, generator=g) * size
        single = case.with_(topk_weights=weights)
        assert torch.equal(single.with_(out_dtype=dtype).run(), single.run().to(dtype))


@pytest.mark.parametrize("word", WORDS)
def test_unwritten_memory_stays_unread(word: str) -> None:
    case = with_scheme(problem(7, T=64, H=32, I=24, E=8, K=4), word)
    ids = torch.full((64, 4), 3)
    ids[:, 1::2] = -1
    weights = case.topk_weights.clone()
    weights[:, 1::2] = float("nan")
    case = case.with_(topk_ids=ids, topk_weights=weights)
    wanted = case.run()
    assert bool(torch.isfinite(wanted).all())
    for _ in range(20):
        poison((64, 4, 32), (64, 4, 24), (64, 32))
        assert torch.equal(case.run(), wanted)
