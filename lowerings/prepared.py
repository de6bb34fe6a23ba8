"""Repeat eager CUDA calls of int8moe::experts that differ from one before in addresses only.

A call's checks, kernels, tiles and their arguments follow from metadata. The first call of a kind
is checked, runs as eager.py says and is recorded; the next ones allocate and launch. What cannot be
repeated runs as eager.py says every time.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from triton import knobs

from .. import compat_triton
from ..ops.arguments import ExpertsArguments, with_finite_limit
from ..ops.checks import check_experts
from . import eager, variants
from .launches import Recording, recorded
from .repeats import repeat_of

# Calls that are remembered, by what tensors do not tell, as a prompt's length; and of each those
# that differ in tensors, as the layers of a model may.
MOST_KEYS: Final = 256
MOST_KINDS: Final = 16
# What Triton specialises kernels for, in bytes.
ALIGNMENT: Final = 16

# By value: 0.0 and -0.0 are one, between which nothing differs but a zero's sign.
Key = tuple[Any, ...]
# Says whether tensors are like those of a call; repeats that at other addresses, None: cannot be.
Kind = tuple[Callable[..., bool], Callable[[tuple[int, ...]], Tensor] | None]


class _Met:
    """Hold the kinds of calls with one key, and when the last one came."""

    __slots__ = ("kinds", "turn")

    def __init__(self, kinds: tuple[Kind, ...], turn: int) -> None:
        self.kinds = kinds
        self.turn = turn


_met: Final[dict[Key, _Met]] = {}
_next_turn: Final = itertools.count().__next__
# Not empty while tests and benchmarks ask for other kernels, or for none of this.
_forced, _in_turn = variants._forced, variants._in_turn
_plainly: Final[list[bool]] = []
_is_watched: Final = compat_triton.launch_watch(knobs.runtime)


def experts(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation_quant: str = "token",
    a13_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    gated: bool = True,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute int8moe::experts; checks arguments whose like it has not met.

    The way to a hit is what few tokens cost the host: each name and call in it counts.
    """
    tensors: Any = (hidden_states, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids)
    x, up, down = hidden_states.data_ptr(), w13.data_ptr(), w2.data_ptr()
    up_scale, down_scale = w13_scale.data_ptr(), w2_scale.data_ptr()
    weights, ids = topk_weights.data_ptr(), topk_ids.data_ptr()
    addresses: Any = (x, up, up_scale, down, down_scale, weights, ids)
    is_aligned = (x | up | up_scale | down | down_scale | weights | ids) % ALIGNMENT == 0
    layout: Any = None
    is_short = a13_scale is None and a2_scale is None and w13_bias is None
    if not (is_short and w2_bias is None and expert_map is None and is_aligned):
        more = (a13_scale, a2_scale, w13_bias, w2_bias, expert_map)
        tensors += tuple([tensor for tensor in more if tensor is not None])
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        layout = tuple([a % ALIGNMENT == 0 for a in addresses]), tuple([t is None for t in more])
    words = (activation_quant, activation, alpha, beta, limit, gated, out_dtype)
    key = (hidden_states.shape, layout, words, apply_router_weight_on_input)
    is_usual = not (_forced or _in_turn or _plainly or _is_watched())
    met = _met.get(key) if is_usual else None
    if met is not None:
        met.turn = _next_turn()
        for is_same, repeat in met.kinds:
            if is_same(*tensors):
                if repeat is not None:
                    return repeat(addresses)
                is_usual = False
                break
    first = (activation_quant, a13_scale, a2_scale, w13_bias, w2_bias)
    gate = (activation, alpha, beta, limit, gated)
    last = (expert_map, apply_router_weight_on_input, out_dtype)
    rest: Any = (*first, *gate, *last)
    call = ExpertsArguments(*tensors[:7], *rest)
    return _run(call, key if is_usual else None, tensors)


def _run(call: ExpertsArguments, key: Key | None, tensors: tuple[Tensor, ...]) -> Tensor:
    """Check and compute a call; with a key, remember how."""
    check_experts(call, traced=False)
    call = with_finite_limit(call)
    # Of two tensors at one address it could not be told which a kernel reads.
    is_told_apart = len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    is_same = compat_triton.metadata_check(tensors) if key is not None and is_told_apart else None
    if key is None or is_same is None:
        return eager.experts(call)
    recording = Recording(tensors)
    with recorded(recording):
        result = eager.experts(call)
    if recording.launches:
        _remember(key, (is_same, repeat_of(recording, result)))
    return result


def _remember(key: Key, kind: Kind) -> None:
    met = _met.get(key)
    known = () if met is None else met.kinds[: MOST_KINDS - 1]
    while met is None and len(_met) >= MOST_KEYS:
        oldest = min(_met.copy().items(), key=lambda item: item[1].turn)
        _met.pop(oldest[0], None)
    _met[key] = _Met((kind, *known), _next_turn())


def forget() -> None:
    """Forget all calls, for tests and benchmarks: what kernels they get has changed."""
    _met.clear()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Check and choose and bind at every call, for tests and benchmarks."""
    _plainly.append(True)
    try:
        yield
    finally:
        _plainly.pop()
