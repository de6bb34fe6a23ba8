"""Cases that cover every argument of int8moe::experts, for interpreter and GPU tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from support import Problem, problem, with_scheme

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@dataclass(frozen=True)
class Case:
    """Name a problem; build makes it afresh, because tensors are no test parameters."""

    name: str
    build: Callable[[], Problem]


def _gpt_oss() -> Problem:
    case = problem(3, T=9, H=80, I=48, E=4, K=2, alpha=1.702, beta=1.0, limit=0.5)
    biases = {
        "w13_bias": torch.linspace(-1, 1, 4 * 96).reshape(4, 96).to(torch.bfloat16),
        "w2_bias": torch.linspace(1, -1, 4 * 80).reshape(4, 80),
    }
    return case.with_(**biases)


def _with_ids(case: Problem, ids: list[list[int]], dtype: torch.dtype = torch.int64) -> Problem:
    weights = case.topk_weights.clone()
    local = torch.tensor(ids, dtype=dtype)
    # A skipped slot is selected away, never multiplied by 0.
    weights[(local < 0) | (local > 3)] = float("nan")
    return case.with_(topk_ids=local, topk_weights=weights)


def _dead_ids() -> Problem:
    ids = [[0, 1], [2, 3], [1, -1], [-1, -1], [3, 4], [2**40, 0]]
    return _with_ids(problem(4, T=6), ids)


def _mapped() -> Problem:
    ids = torch.tensor([[0, 1], [2, 3], [2, -1], [3, 1], [7, 0], [2, 2]], dtype=torch.int32)
    return problem(4, T=6, E=2).with_(topk_ids=ids, expert_map=torch.tensor([0, -1, 1, -1]))


def _codes_given(word: str) -> Problem:
    g = torch.Generator().manual_seed(5)
    case = with_scheme(problem(5, T=6), word)
    codes = torch.randint(-128, 128, (6, 64), generator=g, dtype=torch.int8)
    scale = torch.rand(6, 1, generator=g) / 50 if word == "token" else torch.tensor([0.02])
    return case.with_(hidden_states=codes, a13_scale=scale)


def _strided() -> Problem:
    """Lay out everything that may be: transposed rows, padded weights, expanded scales."""
    case = problem(6, T=7, H=33, I=17, dtype=torch.float32)

    def padded(codes: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*codes.shape[:2], codes.shape[2] + 5), 127, dtype=torch.int8)
        wide[..., : codes.shape[2]] = codes
        return wide[..., : codes.shape[2]]

    return case.with_(
        hidden_states=case.hidden_states.t().contiguous().t(),
        w13=padded(case.w13),
        w2=padded(case.w2),
        w13_scale=case.w13_scale.t().contiguous().t().unsqueeze(-1),
        topk_ids=case.topk_ids.t().contiguous().t(),
        topk_weights=case.topk_weights.t().contiguous().t(),
    )


def _special_rows() -> Problem:
    case = problem(7, T=6)
    rows = case.hidden_states.clone()
    rows[1] = 0
    rows[2] = 0.25
    rows[3, 5] = 1e4
    rows[4, 3] = float("nan")
    rows[5, 2] = float("inf")
    return case.with_(hidden_states=rows)


def _static_special() -> Problem:
    case = with_scheme(_special_rows(), "static")
    return case


def _simple(word: str, dtype: torch.dtype, granularity: str = "channel") -> Callable[[], Problem]:
    return lambda: with_scheme(problem(1, dtype=dtype), word, granularity)


def _gate(activation: str, gated: bool, dtype: torch.dtype) -> Callable[[], Problem]:
    return lambda: problem(2, T=7, H=33, I=17, dtype=dtype, gated=gated, activation=activation)


def _on_input(word: str) -> Problem:
    case = with_scheme(problem(8, T=6, K=1), word)
    ids = case.topk_ids.clone()
    ids[2] = -1
    weights = case.topk_weights.uniform_(0.1, 2.0, generator=torch.Generator().manual_seed(1))
    weights[2] = float("nan")
    return case.with_(topk_ids=ids, topk_weights=weights, apply_router_weight_on_input=True)


WORDS = ("token", "tensor", "static", "none")
CASES: tuple[Case, ...] = (
    *(
        Case(f"{word}-{str(dtype)[6:]}", _simple(word, dtype))
        for word in WORDS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
    *(
        Case(f"{word}-{granularity}", _simple(word, torch.bfloat16, granularity))
        for word in WORDS
        for granularity in ("tensor", "halves")
    ),
    *(Case(f"gated-{name}", _gate(name, True, torch.float16)) for name in ACTIVATIONS),
    *(Case(f"plain-{name}", _gate(name, False, torch.float32)) for name in ACTIVATIONS),
    Case("gpt-oss", _gpt_oss),
    Case("gpt-oss-none", lambda: _gpt_oss().with_(activation_quant="none")),
    Case("dead-ids", _dead_ids),
    Case("dead-ids-tensor", lambda: with_scheme(_dead_ids(), "tensor")),
    Case("mapped", _mapped),
    *(Case(f"codes-{word}", lambda word=word: _codes_given(word)) for word in WORDS[:3]),
    *(Case(f"on-input-{word}", lambda word=word: _on_input(word)) for word in WORDS),
    Case("strided", _strided),
    Case("strided-none", lambda: _strided().with_(activation_quant="none")),
    Case("special-rows", _special_rows),
    Case("special-static", _static_special),
    Case("out-fp32", lambda: problem(9, out_dtype=torch.float32)),
    Case("out-fp16-none", lambda: problem(9, out_dtype=torch.float16, activation_quant="none")),
    Case("one-token", lambda: problem(10, T=1)),
    Case("more-rows", lambda: problem(11, T=70, E=3, K=2)),
)


def weights_as(case: Problem, dtype: torch.dtype) -> Problem:
    """Return a case with router weights of another dtype."""
    return replace(case, topk_weights=case.topk_weights.to(dtype))
