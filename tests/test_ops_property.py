"""Throw random shapes, options and routing at the CPU kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import Problem, assert_as_reference, problem, with_scheme

WORDS = ("token", "tensor", "static", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw any call that the operator accepts, small."""
    gated = draw(st.booleans())
    sizes = {
        "T": draw(st.integers(0, 12)),
        "H": draw(st.integers(1, 70)),
        "I": draw(st.integers(1, 40)),
        "E": draw(st.integers(1, 6)),
        "K": draw(st.integers(1, 5)),
    }
    seed = draw(st.integers(0, 2**31))
    activation = draw(st.sampled_from(ACTIVATIONS))
    options: dict[str, Any] = {"activation": activation}
    if activation == "silu":
        options["alpha"] = draw(st.sampled_from([1.0, 1.702, 0.5]))
    if gated:
        options["beta"] = draw(st.sampled_from([0.0, 1.0]))
        options["limit"] = draw(st.sampled_from([None, 7.0, 0.5, 0.0]))
    options["out_dtype"] = draw(st.sampled_from([None, *DTYPES]))
    on_input = draw(st.booleans()) and sizes["K"] == 1
    options["apply_router_weight_on_input"] = on_input
    case = problem(seed, **sizes, dtype=draw(st.sampled_from(DTYPES)), gated=gated, **options)
    granularity = draw(st.sampled_from(["channel", "tensor"] + ["halves"] * gated))
    case = with_scheme(case, draw(st.sampled_from(WORDS)), granularity)

    g = torch.Generator().manual_seed(seed)
    rows = case.w13.shape[1]
    if draw(st.booleans()):
        case = case.with_(w13_bias=torch.randn(sizes["E"], rows, generator=g))
    if draw(st.booleans()):
        case = case.with_(w2_bias=torch.randn(sizes["E"], sizes["H"], generator=g).bfloat16())
    known = sizes["E"]
    if draw(st.booleans()):
        known = draw(st.integers(1, 9))
        table = torch.randint(-1, sizes["E"] + 1, (known,), generator=g, dtype=torch.int32)
        case = case.with_(expert_map=table)
    ids = torch.randint(-2, known + 2, (sizes["T"], sizes["K"]), generator=g)
    if draw(st.booleans()):
        ids = ids.int()
    if draw(st.booleans()):
        case = case.with_(hidden_states=case.hidden_states.t().contiguous().t())
    return case.with_(topk_ids=ids)


def hold(case: Problem) -> None:
    """Hold one problem to the bound, to the reference's bits and to its rows alone."""
    before = [tensor.clone() for tensor in case.args]
    out = case.run()
    assert all(torch.equal(a, b) for a, b in zip(before, case.args, strict=True))
    assert_as_reference(case)
    word = case.options["activation_quant"]
    if word in ("token", "static"):
        tokens = out.shape[0]
        backwards = torch.arange(tokens - 1, -1, -1)
        assert torch.equal(case.rows(backwards).run(), out[backwards])
        if tokens:
            assert torch.equal(case.rows(slice(0, 1)).run(), out[:1])


FAST = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@FAST
@given(problems())
def test_any_problem(case: Problem) -> None:
    hold(case)


@pytest.mark.slow
@settings(FAST, max_examples=3000, derandomize=False)
@given(problems())
def test_many_problems(case: Problem) -> None:
    hold(case)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [16, 33, 35, 80, 160, 192, 704, 2816, 2880])
@pytest.mark.parametrize("intermediate", [17, 48, 80, 96, 192, 352, 640, 704, 768, 1408])
def test_grid_of_sizes(hidden: int, intermediate: int) -> None:
    for word in WORDS:
        for gated in (True, False):
            case = problem(1, T=9, H=hidden, I=intermediate, E=4, gated=gated)
            hold(with_scheme(case, word))
