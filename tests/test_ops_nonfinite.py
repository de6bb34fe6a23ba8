"""Say where NaN and infinities may go: one row, every row, or nowhere, by scheme."""

from __future__ import annotations

import math

import pytest
import torch
from support import Problem, assert_as_reference, problem, with_scheme
from torch import Tensor

WORDS = ("token", "tensor", "static", "none")
NONFINITE = (math.nan, math.inf, -math.inf)


def spoil(case: Problem, value: float, row: int = 1) -> Problem:
    x = case.hidden_states.clone()
    x[row, 3] = value
    return case.with_(hidden_states=x)


def assert_same(case: Problem) -> Tensor:
    """Return the kernel's result, held to the reference where values are not finite, too."""
    out = case.run()
    assert torch.equal(torch.isfinite(out), torch.isfinite(case.reference()))
    return out


@pytest.mark.parametrize("value", NONFINITE)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_token_keeps_it_in_its_row(value: float, activation: str, gated: bool) -> None:
    limit = 2.0 if gated else None
    case = problem(1, gated=gated, activation=activation, limit=limit, activation_quant="token")
    out = assert_same(spoil(case, value))
    # a row's scale is not finite then, so neither is anything it makes; clamps pass NaN on
    assert not torch.isfinite(out[1]).any()
    others = [0, 2, 3, 4]
    assert torch.equal(out[others], case.run()[others])


@pytest.mark.parametrize("value", NONFINITE)
def test_tensor_spreads_it_to_every_live_row(value: float) -> None:
    case = with_scheme(problem(2), "tensor")
    ids = case.topk_ids.clone()
    ids[4] = -1
    case = case.with_(topk_ids=ids)
    out = assert_same(spoil(case, value))
    assert not torch.isfinite(out[:4]).any()
    assert torch.count_nonzero(out[4]) == 0
    # the scale is over all rows, also those that go nowhere
    assert not torch.isfinite(assert_same(spoil(case, value, row=4))[:4]).any()


@pytest.mark.parametrize("value", NONFINITE)
def test_static_saturates_infinities_and_takes_nan_as_zero(value: float) -> None:
    case = with_scheme(problem(3), "static")
    out = assert_same(spoil(case, value))
    finite = {math.nan: 0.0, math.inf: 1e30, -math.inf: -1e30}
    same = next(v for k, v in finite.items() if k == value or (k != k and value != value))
    assert torch.isfinite(out).all()
    assert torch.equal(out, spoil(case, same).run())


@pytest.mark.parametrize("value", NONFINITE)
def test_weight_only_keeps_it_in_its_row(value: float) -> None:
    case = with_scheme(problem(4), "none")
    out = assert_same(spoil(case, value))
    assert not torch.isfinite(out[1]).all()
    others = [0, 2, 3, 4]
    assert torch.equal(out[others], case.run()[others])


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("on_input", [False, True])
def test_skipped_slots_hold_anything(word: str, on_input: bool) -> None:
    top_k = 1 if on_input else 2
    case = with_scheme(problem(5, K=top_k), word).with_(apply_router_weight_on_input=on_input)
    ids, weights = case.topk_ids.clone(), case.topk_weights.clone()
    ids[2], ids[3, -1] = -1, 4
    clean = case.with_(topk_ids=ids)
    weights[2], weights[3, -1] = math.nan, math.inf
    spoilt = clean.with_(topk_weights=weights)
    assert torch.equal(assert_same(spoilt), clean.run())
    assert torch.count_nonzero(spoilt.run()[2]) == 0


@pytest.mark.parametrize("word", ["token", "static", "none"])
def test_dead_rows_are_zero_whatever_they_hold(word: str) -> None:
    case = with_scheme(problem(6), word)
    ids = case.topk_ids.clone()
    ids[1] = torch.tensor([-1, 4])
    case = case.with_(topk_ids=ids)
    for value in NONFINITE:
        assert torch.equal(assert_same(spoil(case, value)), case.run())


@pytest.mark.parametrize("word", WORDS)
def test_router_weights_that_are_not_finite_stay_in_their_row(word: str) -> None:
    case = with_scheme(problem(7), word)
    weights = case.topk_weights.clone()
    weights[2, 1] = math.nan
    out = assert_same(case.with_(topk_weights=weights))
    assert torch.isnan(out[2]).all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], case.run()[others])


@pytest.mark.parametrize("word", ["token", "none"])
def test_overflow_of_the_intermediate_stays_in_its_row(word: str) -> None:
    # fp16 holds up to 65504: row 0 overflows when the intermediate is rounded to it
    case = with_scheme(problem(8, dtype=torch.float16), word)
    x = case.hidden_states.clone()
    x[0] *= 2000
    out = assert_same(case.with_(hidden_states=x))
    assert not torch.isfinite(out[0]).all()
    assert torch.equal(out[1:], case.run()[1:])


@pytest.mark.parametrize("word", ["token", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_zero_have_scale_one(word: str, dtype: torch.dtype) -> None:
    case = with_scheme(problem(9, dtype=dtype), word)
    x, w13, w13_scale = case.hidden_states.clone(), case.w13.clone(), case.w13_scale.clone()
    x[1], w13[0], w13_scale[0] = 0, 0, 0
    case = case.with_(w13=w13, w13_scale=w13_scale)
    out = assert_same(case.with_(hidden_states=x))
    assert torch.isfinite(out).all() and torch.count_nonzero(out[1]) == 0
    assert torch.count_nonzero(case.with_(hidden_states=torch.zeros_like(x)).run()) == 0
    # relu with every gate negative: the intermediate is a row of zeros
    negative = torch.cat([-w13[:, :32].abs(), w13[:, 32:]], dim=1)
    dead = case.with_(hidden_states=x.abs(), w13=negative, activation="relu").run()
    assert torch.count_nonzero(dead) == 0
    # an amax whose 127th part is no fp32 number any more
    tiny = torch.full_like(x, 1e-44 if dtype == torch.float32 else 0)
    assert torch.isfinite(case.with_(hidden_states=tiny).run()).all()


def test_trial_inputs_of_every_awkward_kind_at_once() -> None:
    # a zero row, an all-equal row, one huge value, an expert without tokens, an id of -1
    case = problem(10, E=8)
    x, ids = case.hidden_states.clone(), case.topk_ids % 7
    x[0], x[1], x[2, 5], ids[3, 0] = 0, 0.5, 1e4, -1
    case = case.with_(hidden_states=x, topk_ids=ids)
    out = case.run()
    assert torch.isfinite(out).all()
    assert_as_reference(case)
    for row in range(5):
        assert torch.equal(case.rows(slice(row, row + 1)).run()[0], out[row])
