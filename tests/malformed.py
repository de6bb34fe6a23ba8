"""Calls of int8moe::experts that are wrong in one argument each, as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support import Problem, problem, with_scheme
from torch import Tensor

T, H, I, E, K = 5, 48, 16, 4, 2  # noqa: E741


def base(word: str = "token", **options: Any) -> Problem:
    return with_scheme(problem(1, T=T, H=H, I=I, E=E, K=K, **options), word)


def floats(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def ints(*shape: int, dtype: torch.dtype = torch.int8, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def coded(word: str = "token", **changes: Any) -> Problem:
    """Build a problem with int8 rows and their scale."""
    rows = ints(T, H)
    scale = floats(T) if word in ("token", "none") else floats(1)
    return base(word).with_(hidden_states=rows, a13_scale=scale).with_(**changes)


def weights_of(device: str) -> dict[str, Tensor]:
    """Return the weights and scales of base(), on a device."""
    case = base()
    names = ("w13", "w13_scale", "w2", "w2_scale")
    return {name: getattr(case, name).to(device) for name in names}


@dataclass(frozen=True)
class Bad:
    """Make a call wrong in one argument; of_tokens: wrong for some values of an unbacked T only."""

    argument: str
    make: Callable[[], Problem]
    wanted: str = ""
    of_tokens: bool = False


def bad(argument: str, wanted: str = "", *, of_tokens: bool = False, **changes: Any) -> Bad:
    return Bad(argument, lambda: base().with_(**changes), wanted, of_tokens)


def bad_from(
    argument: str, make: Callable[[], Problem], wanted: str = "", *, of_tokens: bool = False
) -> Bad:
    return Bad(argument, make, wanted, of_tokens)


int64 = torch.int64
BAD: dict[str, Bad] = {
    # words and numbers
    "unknown word": bad("activation_quant", "token", activation_quant="dynamic"),
    "empty word": bad("activation_quant", activation_quant=""),
    "unknown activation": bad("activation", "silu", activation="swish"),
    "alpha with gelu": bad("alpha", "silu", activation="gelu", alpha=1.702),
    "alpha with relu, not gated": bad_from(
        "alpha", lambda: base(gated=False, activation="relu", alpha=0.5)
    ),
    "alpha nan": bad("alpha", "finite", alpha=float("nan")),
    "alpha beyond fp32": bad("alpha", "finite in fp32", alpha=1e39),
    "beta beyond fp32": bad("beta", "finite in fp32", beta=-1e39),
    "beta inf": bad("beta", "finite", beta=float("inf")),
    "beta not gated": bad_from("beta", lambda: base(gated=False, beta=1.0), "0.0"),
    "limit not gated": bad_from("limit", lambda: base(gated=False, limit=7.0), "None"),
    "limit negative": bad("limit", ">= 0", limit=-1.0),
    "limit nan": bad("limit", limit=float("nan")),
    "out_dtype int8": bad("out_dtype", "torch.bfloat16", out_dtype=torch.int8),
    "out_dtype fp64": bad("out_dtype", out_dtype=torch.float64),
    # weights
    "w13 of floats": bad("w13", "torch.int8", w13=floats(E, 2 * I, H)),
    "w13 unsigned": bad("w13", w13=ints(E, 2 * I, H, dtype=torch.uint8)),
    "w13 2-D": bad("w13", "[E,N,H]", w13=ints(2 * I, H)),
    "w13 odd rows": bad("w13", "even", w13=ints(E, 2 * I + 1, H)),
    "w13 no rows": bad("w13", "N > 0", w13=ints(E, 0, H)),
    "w13 no columns": bad("w13", "H > 0", w13=ints(E, 2 * I, 0)),
    "w13 transposed": bad("w13", "stride", w13=ints(E, H, 2 * I).transpose(1, 2)),
    "w13 every second": bad("w13", "stride", w13=ints(E, 2 * I, 2 * H)[..., ::2]),
    "w2 transposed": bad("w2", "stride", w2=ints(E, I, H).transpose(1, 2)),
    "w2 expanded columns": bad("w2", "stride", w2=ints(E, H, 1).expand(E, H, I)),
    "w2 of floats": bad("w2", "torch.int8", w2=floats(E, H, I, dtype=torch.bfloat16)),
    "w2 2-D": bad("w2", "[E,H,I]", w2=ints(H, I)),
    "w2 other experts": bad("w2", str([E, H, I]), w2=ints(E + 1, H, I)),
    "w2 other I": bad("w2", w2=ints(E, H, I + 1)),
    "w2 axes swapped": bad("w2", w2=ints(E, I, H)),
    "w2 for a gate, not gated": bad("w2", str([E, H, 2 * I]), gated=False),
    # weight scales
    "w13_scale fp16": bad(
        "w13_scale", "torch.float32", w13_scale=floats(E, 2 * I, dtype=torch.half)
    ),
    "w13_scale [N]": bad("w13_scale", w13_scale=floats(2 * I)),
    "w13_scale [1,N]": bad("w13_scale", w13_scale=floats(1, 2 * I)),
    "w13_scale [N,2]": bad("w13_scale", w13_scale=floats(2 * I, 2)),
    "w13_scale [N,E]": bad("w13_scale", w13_scale=floats(2 * I, E)),
    "w13_scale [E]": bad("w13_scale", w13_scale=floats(E)),
    "w13_scale grouped": bad("w13_scale", str([E, 2 * I]), w13_scale=floats(E, 2 * I, 2)),
    "w13_scale [E,1,N]": bad("w13_scale", w13_scale=floats(E, 1, 2 * I)),
    "w13_scale [E,N,1,1]": bad("w13_scale", w13_scale=floats(E, 2 * I, 1, 1)),
    "w13_scale 2, not gated": bad_from(
        "w13_scale", lambda: base(gated=False).with_(w13_scale=floats(E, 2))
    ),
    "w2_scale [E,2]": bad("w2_scale", w2_scale=floats(E, 2)),
    "w2_scale [H]": bad("w2_scale", w2_scale=floats(H)),
    "w2_scale bf16": bad("w2_scale", "torch.float32", w2_scale=floats(E, H, dtype=torch.bfloat16)),
    "w2_scale of w13": bad("w2_scale", w2_scale=floats(E, 2 * I)),
    # rows and routing
    "rows fp64": bad("hidden_states", hidden_states=floats(T, H, dtype=torch.float64)),
    "rows 1-D": bad("hidden_states", "[T,H]", hidden_states=floats(H)),
    "rows 3-D": bad("hidden_states", hidden_states=floats(1, T, H)),
    "rows other H": bad("hidden_states", str(H), hidden_states=floats(T, H + 1)),
    "weights int": bad("topk_weights", topk_weights=ints(T, K)),
    "weights 1-D": bad("topk_weights", "[T,K]", topk_weights=floats(T)),
    "weights other T": bad("topk_weights", topk_weights=floats(T - 1, K), of_tokens=True),
    "ids int16": bad("topk_ids", "torch.int64", topk_ids=ints(T, K, dtype=torch.int16)),
    "ids bool": bad("topk_ids", topk_ids=ints(T, K, dtype=torch.bool)),
    "ids float": bad("topk_ids", topk_ids=floats(T, K)),
    "ids other K": bad("topk_ids", str([T, K]), topk_ids=ints(T, K + 1, dtype=int64)),
    "ids other T": bad("topk_ids", topk_ids=ints(T + 1, K, dtype=int64), of_tokens=True),
    "ids 1-D": bad("topk_ids", topk_ids=ints(T, dtype=int64)),
    "two slots weighted on input": bad("topk_ids", "K = 1", apply_router_weight_on_input=True),
    # activation scales
    "static without a13": bad_from(
        "a13_scale", lambda: base("static").with_(a13_scale=None), "static"
    ),
    "static without a2": bad_from(
        "a2_scale", lambda: base("static").with_(a2_scale=None), "static"
    ),
    "static a13 per token": bad_from(
        "a13_scale", lambda: base("static").with_(a13_scale=floats(T)), of_tokens=True
    ),
    "static a2 [1,1]": bad_from("a2_scale", lambda: base("static").with_(a2_scale=floats(1, 1))),
    "static a13 fp16": bad_from(
        "a13_scale", lambda: base("static").with_(a13_scale=floats(1, dtype=torch.half))
    ),
    "a13 with token": bad("a13_scale", "None", a13_scale=floats(1)),
    "a2 with token": bad("a2_scale", "None", a2_scale=floats(1)),
    "a13 with none": bad_from("a13_scale", lambda: base("none").with_(a13_scale=floats(1))),
    "a2 with tensor": bad_from("a2_scale", lambda: base("tensor").with_(a2_scale=floats(1))),
    "codes without scale": bad_from(
        "a13_scale", lambda: coded(a13_scale=None), "int8 hidden_states"
    ),
    "codes, scale of others": bad_from(
        "a13_scale", lambda: coded(a13_scale=floats(T - 1)), of_tokens=True
    ),
    "codes, scale [1,T]": bad_from("a13_scale", lambda: coded(a13_scale=floats(1, T))),
    "codes, scale bf16": bad_from(
        "a13_scale", lambda: coded(a13_scale=floats(T, dtype=torch.bfloat16))
    ),
    "codes, tensor, per token": bad_from(
        "a13_scale", lambda: coded("tensor", a13_scale=floats(T)), of_tokens=True
    ),
    "codes weight-only": bad_from("hidden_states", lambda: coded("none"), "none"),
    "codes, a2 given": bad_from("a2_scale", lambda: coded(a2_scale=floats(1))),
    "codes weighted on input": bad_from(
        "hidden_states",
        lambda: coded(
            topk_weights=floats(T, 1),
            topk_ids=ints(T, 1, dtype=int64),
            apply_router_weight_on_input=True,
        ),
    ),
    # biases and map
    "w13_bias [N]": bad("w13_bias", "[E,N]", w13_bias=floats(2 * I)),
    "w13_bias int": bad("w13_bias", w13_bias=ints(E, 2 * I)),
    "w13_bias of w2": bad("w13_bias", w13_bias=floats(E, H)),
    "w2_bias fp64": bad("w2_bias", w2_bias=floats(E, H, dtype=torch.float64)),
    "w2_bias of w13": bad("w2_bias", "[E,H]", w2_bias=floats(E, 2 * I)),
    "map 2-D": bad("expert_map", "[G]", expert_map=ints(1, E, dtype=int64)),
    "map float": bad("expert_map", expert_map=floats(E)),
    # devices
    "rows elsewhere": bad(
        "hidden_states",
        "device cpu, that of the weights",
        hidden_states=floats(T, H, device="meta"),
    ),
    "weights elsewhere": bad_from(
        "hidden_states", lambda: base().with_(**weights_of("meta")), "device meta, that of the"
    ),
    "w13 elsewhere": bad("w13", "device cpu", w13=ints(E, 2 * I, H, device="meta")),
    "w2_scale elsewhere": bad("w2_scale", "device cpu", w2_scale=floats(E, H, device="meta")),
    "ids elsewhere": bad("topk_ids", "device", topk_ids=ints(T, K, dtype=int64, device="meta")),
    "bias elsewhere": bad("w2_bias", "device", w2_bias=floats(E, H, device="meta")),
    "map elsewhere": bad("expert_map", "device", expert_map=ints(E, dtype=int64, device="meta")),
    "a2 elsewhere": bad_from(
        "a2_scale", lambda: base("static").with_(a2_scale=floats(1, device="meta")), "device"
    ),
}
