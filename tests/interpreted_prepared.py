"""Calls that are repeated, with Triton's interpreter; collected in a process of its own only.

TRITON_INTERPRET decides when a kernel is defined, so test_lowerings_repeated.py starts this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import interpreter  # noqa: F401  (first: it sets TRITON_INTERPRET)
import pytest
import torch
from gpu_cases import CASES
from launched_again import interpreted_launches
from support import Problem, problem, with_scheme

from int8moe_compile import compat_triton
from int8moe_compile.lowerings import eager, launches, prepared, repeats, tiles, variants
from int8moe_compile.lowerings.tiles import Tile
from int8moe_compile.lowerings.variants import Variant
from int8moe_compile.ops.arguments import ExpertsArguments
from int8moe_compile.oracle import DeviceFacts

HOPPER = DeviceFacts("cuda", (9, 0), "sm_90", 232448, 4)
SMALL = Tile(16, 32, 32, 4, 2)
BOTH = replace(SMALL, loads="both", programs=1, group_m=2)
ROW = Tile(1, 32, 256, 4, 1)
VARIANTS = {
    "apart": Variant("apart", SMALL, replace(SMALL, block_n=64)),
    "fused": Variant("fused", SMALL, replace(SMALL, block_n=64)),
    "described": Variant("fused", BOTH, replace(BOTH, is_flat=True)),
    "decode": Variant("decode", ROW, ROW),
}
# A GPU goes through every case.
APART = (
    *("token-bfloat16", "tensor-bfloat16", "none-float16", "gpt-oss", "dead-ids-tensor", "mapped"),
    *("codes-token", "on-input-token", "special-rows", "out-fp32"),
)
OTHERS = ("token-bfloat16", "static-bfloat16", "gpt-oss", "mapped", "dead-ids")
TAKEN = (
    *(("apart", name) for name in APART),
    *((variant, name) for variant in ("fused", "described", "decode") for name in OTHERS),
    *(("decode", name) for name in ("none-bfloat16", "one-token")),
)


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the host for one with a Hopper, and forget what other tests met."""
    monkeypatch.setattr(eager, "facts_of", lambda device: HOPPER)
    monkeypatch.setattr(tiles, "packs_codes", lambda device, a_bytes: False)
    eager._layer_variant.cache_clear()
    prepared.forget()
    with interpreted_launches():
        yield
    prepared.forget()


def built(name: str) -> Problem:
    return next(case for case in CASES if case.name == name).build()


def others(case: Problem) -> Problem:
    """Return a case of the same sizes, types and strides with other values."""

    def other(name: str, tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.roll(1, 0) if tensor.dim() else tensor * 2
        if name.endswith("scale"):
            changed = changed * 0.75
        if name == "hidden_states" and tensor.dtype != torch.int8:
            changed = changed * 1.5
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(changed)

    changes = {**vars(case), **case.options}
    found = {name: other(name, t) for name, t in changes.items() if isinstance(t, torch.Tensor)}
    return case.with_(**found)


def plain(case: Problem) -> torch.Tensor:
    """Compute a case without a look at what was met before."""
    return eager.experts(ExpertsArguments(*case.args, **case.options))


def run(case: Problem) -> torch.Tensor:
    return prepared.experts(*case.args, **case.options)


def known() -> int:
    """Return how many kinds of calls are remembered and can be repeated."""
    return sum(repeat is not None for met in prepared._met.values() for _, repeat in met.kinds)


def repeated(case: Problem) -> torch.Tensor:
    """Compute a case, which must be of a kind that was met: nothing is checked or chosen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "experts", None)
        patch.setattr(prepared, "check_experts", None)
        return run(case)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.stride() == expected.stride()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(("variant", "name"), TAKEN)
def test_other_values_give_the_bits_of_a_plain_call(
    variant: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "layer_variant", lambda call: VARIANTS[variant])
    first, second = built(name), others(built(name))
    found, expected = run(first), plain(second)
    assert not torch.equal(expected.nan_to_num(7.0), found.nan_to_num(7.0))
    assert_equal(repeated(second), expected)
    assert known() == 1


def test_two_launches_of_the_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    from int8moe_compile.lowerings import routing

    monkeypatch.setattr(routing, "ONE_LAUNCH", 0)
    case = problem(1, T=40, E=3)
    monkeypatch.setattr(eager, "layer_variant", lambda call: VARIANTS["fused"])
    run(case)
    assert_equal(repeated(others(case)), plain(others(case)))


def changed_stride(case: Problem) -> Problem:
    wide = torch.zeros(case.hidden_states.shape[0], 96, dtype=case.hidden_states.dtype)
    wide[:, :64] = case.hidden_states
    return case.with_(hidden_states=wide[:, :64])


def changed_address(case: Problem) -> Problem:
    flat = torch.zeros(case.topk_weights.numel() + 1)
    flat[1:] = case.topk_weights.flatten()
    return case.with_(topk_weights=flat[1:].view_as(case.topk_weights))


CHANGES = {
    "stride": changed_stride,
    "alignment": changed_address,
    "dtype": lambda case: case.with_(hidden_states=case.hidden_states.to(torch.float16)),
    "ids": lambda case: case.with_(topk_ids=case.topk_ids.to(torch.int32)),
    "tokens": lambda case: case.rows(slice(0, 1)),
    "limit": lambda case: case.with_(limit=0.5),
    "alpha": lambda case: case.with_(alpha=1.7),
    "activation": lambda case: case.with_(activation="gelu"),
    "output": lambda case: case.with_(out_dtype=torch.float32),
    "bias": lambda case: case.with_(w13_bias=torch.ones(4, 64)),
    "other bias": lambda case: case.with_(w2_bias=torch.ones(4, 64)),
    "map": lambda case: case.with_(expert_map=torch.arange(4).flip(0)),
    "word": lambda case: with_scheme(case, "static"),
    "scales": lambda case: with_scheme(case, "token", "halves"),
    "experts": lambda case: problem(5, T=2, E=3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_kind_is_not_taken_for_the_same(name: str) -> None:
    """Both kinds are kept then, and each gives its own bits."""
    case = problem(1, T=2)
    other = CHANGES[name](case)
    run(case)
    assert_equal(run(other), plain(other))
    assert known() == 2
    expected = plain(others(other))
    assert_equal(repeated(others(other)), expected)
    run(case)
    assert known() == 2


def test_a_wrong_argument_is_refused_each_time() -> None:
    case = problem(1)
    run(case)
    wrong = case.with_(w2_scale=case.w2_scale.double())
    for _ in range(2):
        with pytest.raises(ValueError, match="w2_scale"):
            run(wrong)
    with pytest.raises(ValueError, match="limit"):
        run(case.with_(limit=-1.0))
    assert known() == 1


def test_calls_that_copy_an_argument_run_as_before() -> None:
    case = built("strided")
    assert_equal(run(case), plain(case))
    assert known() == 0 and len(prepared._met) == 1
    assert_equal(run(others(case)), plain(others(case)))
    assert len(next(iter(prepared._met.values())).kinds) == 1


def test_two_arguments_at_one_address_are_not_recorded() -> None:
    one = torch.tensor(0.05)
    tied = with_scheme(problem(1), "static").with_(a13_scale=one, a2_scale=one)
    assert_equal(run(tied), plain(tied))
    assert not prepared._met
    apart = tied.with_(a2_scale=torch.tensor(0.04))
    run(apart)
    # Repeating may read one address twice: which is which is known by then.
    assert_equal(run(tied.with_(a2_scale=one.view_as(one))), plain(tied))


def test_unknown_launchers_leave_calls_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(1)
    monkeypatch.setattr(compat_triton, "launcher_of", lambda kernel, compiled: None)
    for _ in range(2):
        assert_equal(run(case), plain(case))
    assert known() == 0
    prepared.forget()
    monkeypatch.setattr(compat_triton, "metadata_check", lambda tensors: None)
    assert_equal(run(case), plain(case))
    assert not prepared._met


def test_forced_kernels_and_watched_launches_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = problem(1)
    run(case)
    calls: list[Any] = []
    computed = eager.experts
    monkeypatch.setattr(eager, "experts", lambda call: calls.append(0) or computed(call))
    with variants.forced(VARIANTS["fused"]):
        run(case)
    with variants.in_turn():
        run(case)
    with prepared.plainly():
        run(case)
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "_is_watched", lambda: True)
        run(case)
    assert len(calls) == 4
    run(case)
    assert len(calls) == 4 and known() == 1


def test_the_kinds_met_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_KEYS", 2)
    cases = [problem(1, T=T) for T in (1, 2, 3)]
    run(cases[0])
    run(cases[1])
    run(cases[0])
    run(cases[2])
    assert [key[0][0] for key in prepared._met] == [1, 3]
    monkeypatch.setattr(prepared, "MOST_KINDS", 2)
    for experts in (2, 3, 5):
        run(problem(1, T=3, E=experts))
    assert [len(met.kinds) for met in prepared._met.values()] == [1, 2]
    assert_equal(repeated(problem(2, T=3, E=5)), plain(problem(2, T=3, E=5)))


def test_no_tokens() -> None:
    case = problem(1, T=1).rows(slice(0, 0))
    for _ in range(2):
        assert run(case).shape == (0, 64)
    assert not prepared._met


def test_nothing_of_a_call_is_kept() -> None:
    import weakref

    case = problem(1)
    held = [weakref.ref(tensor) for tensor in case.args]
    held.append(weakref.ref(run(case)))
    del case
    assert not any(ref() is not None for ref in held) and known() == 1


def test_results_are_fresh_and_buffers_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(1, T=9)
    run(case)
    first, second = repeated(case), repeated(case)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == first.nbytes


def test_an_unwritten_byte_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers come with whatever was there; here that is garbage."""
    case = with_scheme(problem(1, T=9), "tensor")
    make = compat_triton.buffer_maker("cpu")
    assert make is not None

    def poisoned(*args: Any) -> torch.Tensor:
        made = make(*args)
        made.view(torch.uint8).fill_(0xFF) if made.numel() else None
        return made

    monkeypatch.setattr(compat_triton, "buffer_maker", lambda device_type: poisoned)
    run(case)
    assert_equal(repeated(others(case)), plain(others(case)))


def recording_of(sizes: list[int], uses: list[list[int]]) -> launches.Recording:
    recording = launches.Recording([])
    recording.buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for used in uses:
        places = tuple(launches.Place("buffer", index) for index in used)
        recording.launches.append(launches.Launch(None, None, 1, places))
    return recording


def test_buffers_share_memory_only_when_apart() -> None:
    recording = recording_of([1000, 600, 2000, 513], [[0, 1], [1, 2], [2, 3], [3]])
    memory = repeats.arrange(recording, output=-1)
    spans = {
        index: range(offset, offset + recording.buffers[index].nbytes)
        for index, offset in memory.offsets.items()
    }
    together = [(0, 1), (1, 2), (2, 3)]
    assert all(not set(spans[a]) & set(spans[b]) for a, b in together)
    assert all(offset % repeats.BUFFER_BYTES == 0 for offset in memory.offsets.values())
    # 0 with 2 without 0, 1 or 3: the largest and one other beside it at any time.
    assert memory.size == 2048 + 1024
