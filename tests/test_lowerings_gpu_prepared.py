"""Eager calls that repeat what one before launched, on a GPU: bits, graphs, streams, devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_cases import CASES
from support import EXPERTS, Problem, problem, with_scheme

from int8moe_compile import compat_inductor
from int8moe_compile.lowerings import direct, eager, prepared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Without routing, few tokens and many, one launch of the routing and two.
TOKENS = (1, 2, 16, 64, 300, 1100, 4096)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    prepared.forget()
    yield
    prepared.forget()


def sized(T: int, seed: int = 0, word: str = "token", **options: Any) -> Problem:
    case = problem(seed, T=T, H=512, I=384, E=8, K=2, **options)
    return with_scheme(case, word).to("cuda")


def plain(case: Problem) -> torch.Tensor:
    with prepared.plainly():
        return case.run()


def known() -> int:
    """Return how many kinds of calls can be repeated."""
    return sum(repeat is not None for met in prepared._met.values() for _, repeat in met.kinds)


def repeated(case: Problem) -> torch.Tensor:
    """Compute a case whose kind was met: nothing is checked, chosen or bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "experts", None)
        patch.setattr(prepared, "check_experts", None)
        return case.run()


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.is_contiguous()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("word", ["token", "static", "tensor", "none"])
@pytest.mark.parametrize("T", TOKENS)
def test_other_tensors_give_the_bits_of_a_plain_call(T: int, word: str) -> None:
    sized(T, 1, word).run()
    case = sized(T, 2, word)
    expected = plain(case)
    assert known() == 1
    for _ in range(3):
        assert_equal(repeated(case), expected)


@pytest.mark.parametrize("T", [300, 1100])
def test_tiles_by_descriptor(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are no asynchronous products."""
    monkeypatch.setattr(compat_inductor, "gluon_compiles", lambda: False)
    eager._layer_variant.cache_clear()
    try:
        sized(T, 1).run()
        case = sized(T, 2)
        expected = plain(case)
        for _ in range(3):
            assert_equal(repeated(case), expected)
    finally:
        eager._layer_variant.cache_clear()


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_argument(name: str) -> None:
    built = next(case for case in CASES if case.name == name).build().to("cuda")
    expected = plain(built)
    for _ in range(3):
        assert_equal(built.run(), expected)
    strided = name.startswith("strided")
    assert known() == (0 if strided else 1)


@pytest.mark.parametrize("T", [1, 16, 64])
@pytest.mark.parametrize("at_once", [True, False])
def test_both_ways_of_launching(T: int, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function in C where it builds, which it has to here, else by Triton's launchers."""
    assert direct.launch_all() is not None
    if not at_once:
        monkeypatch.setattr(direct, "launch_all", lambda: None)
    sized(T, 1).run()
    ((_, repeat),) = next(iter(prepared._met.values())).kinds
    assert repeat is not None and hasattr(repeat, "kernels") == at_once
    for seed in range(2, 6):
        case = sized(T, seed)
        assert_equal(repeated(case), plain(case))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("T", [1, 64])
def test_grad_modes(T: int, mode: Any) -> None:
    case = sized(T, 3)
    expected = plain(case)
    with mode():
        case.run()
        found = repeated(case)
    assert_equal(found, expected)
    assert found.is_inference() == (mode is torch.inference_mode) and not found.requires_grad
    wanting = case.with_(hidden_states=case.hidden_states.clone().requires_grad_())
    assert wanting.run().requires_grad
    assert_equal(wanting.run(), expected)


@pytest.mark.parametrize("T", [1, 16, 64])
def test_calls_in_a_row(T: int) -> None:
    cases = [sized(T, seed) for seed in range(6)]
    expected = [plain(case) for case in cases]
    outs = [case.run() for _ in range(30) for case in cases]
    assert known() == 1
    for turn, out in enumerate(outs):
        assert torch.equal(out, expected[turn % 6]), turn


@pytest.mark.parametrize("T", [1, 16, 64])
def test_a_graph_records_what_is_repeated(T: int) -> None:
    case = sized(T)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = repeated(case)
    for seed in range(1, 4):
        other = sized(T, seed)
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        assert torch.equal(out, plain(case))


def test_a_call_met_while_a_graph_records() -> None:
    case = sized(1)
    plain(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = case.run()
        second = repeated(case)
    graph.replay()
    expected = plain(case)
    assert torch.equal(first, expected) and torch.equal(second, expected)
    del first, second, graph
    assert torch.equal(repeated(case), expected)


@pytest.mark.parametrize("T", [1, 64])
def test_the_current_stream_is_launched_on(T: int) -> None:
    case = sized(T)
    expected = plain(case)
    case.run()
    side = torch.cuda.Stream()
    rows = case.hidden_states.clone()
    late = case.with_(hidden_states=torch.zeros_like(rows))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # Whoever launched elsewhere would read zeros.
        torch.cuda._sleep(20_000_000)
        late.hidden_states.copy_(rows)
        out = repeated(late)
    side.synchronize()
    assert torch.equal(out, expected)


def test_threads_with_streams_of_their_own() -> None:
    cases = [sized(1, seed) for seed in range(4)]
    expected = [plain(case) for case in cases]
    torch.cuda.synchronize()
    wrong: list[tuple[int, int]] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            outs = [cases[number].run() for _ in range(200)]
        stream.synchronize()
        wrong.extend(
            (number, turn) for turn, o in enumerate(outs) if not torch.equal(o, expected[number])
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("T", [1, 64])
def test_a_device_that_is_not_the_current_one(T: int) -> None:
    here, there = sized(T), problem(0, T=T, H=512, I=384, E=8, K=2).to("cuda:1")
    expected = plain(here)
    for case in (here, there):
        case.run()
    assert known() == 2
    assert_equal(repeated(there).to("cuda:0"), expected)
    with torch.cuda.device(1):
        assert_equal(repeated(here), expected)
        assert torch.cuda.current_device() == 1
    assert repeated(there).device.index == 1


def test_memory_that_was_given_back() -> None:
    case = sized(64)
    expected = case.run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    del filler
    assert torch.equal(repeated(case), expected)


def test_no_memory_is_kept() -> None:
    case = sized(1100)
    for _ in range(2):
        case.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        case.run()
    assert torch.cuda.memory_allocated() == before


def test_hooks_are_told_of_every_launch() -> None:
    from triton import knobs

    case = sized(1)
    expected = case.run()
    seen: list[Any] = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        assert torch.equal(case.run(), expected)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) >= 2
    count = len(seen)
    assert torch.equal(repeated(case), expected) and len(seen) == count


def test_modes_see_the_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    case = sized(1)
    expected = case.run()
    with torch.no_grad(), Calls():
        assert torch.equal(case.run(), expected)
    assert EXPERTS.default in seen


def test_no_synchronisation() -> None:
    case = sized(64)
    case.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        repeated(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_wrong_arguments_are_refused_after_right_ones() -> None:
    case = sized(1)
    case.run()
    for wrong in (
        case.with_(w2_scale=case.w2_scale.double()),
        case.with_(topk_weights=case.topk_weights.cpu()),
        case.with_(beta=float("nan")),
    ):
        with pytest.raises((ValueError, NotImplementedError)):
            wrong.run()
