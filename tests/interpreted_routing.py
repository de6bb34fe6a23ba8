"""The routing kernels in Triton's interpreter; collected in a process of its own only.

TRITON_INTERPRET decides when a kernel is defined, so test_lowerings_interpreter.py starts this.
"""

from __future__ import annotations

from collections.abc import Iterator

import interpreter  # noqa: F401  (first: it sets TRITON_INTERPRET)
import pytest
import torch
from routing_plan import assert_plan
from support import problem

from int8moe_compile.lowerings import eager, routing
from int8moe_compile.ops.arguments import ExpertsArguments


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what torch.empty returns, so that nothing relies on zeros."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def chunks_of(size: int, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 20) -> None:
    """Let any number of contributions take two launches, with small chunks of one block."""
    monkeypatch.setattr(routing, "ONE_LAUNCH", 0)
    monkeypatch.setattr(routing, "CHUNK_BLOCK", size)
    monkeypatch.setattr(routing, "LEAST_CHUNKS", most)
    monkeypatch.setattr(routing, "MOST_COUNTS", 0)


def draw(T: int, K: int, low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, (T, K), generator=torch.Generator().manual_seed(T))


@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize("T", [1, 128, 300])
def test_one_launch(T: int, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "BLOCK", 128)
    ids = draw(T, 3, -2, 14)
    plan = routing.plan(ids, None, num_experts=11, block_m=block_m, is_inverse_wanted=True)
    assert_plan(plan, ids, num_experts=11, block_m=block_m)
    alone = routing.plan(ids, None, num_experts=11, block_m=block_m)
    assert alone.inverse is None and torch.equal(alone.tiles[0], plan.tiles[0])


# T * 3 contributions: one chunk, exact chunks, a last one of 52, 69 whose counts are read in two
# steps, and few chunks of many blocks.
CHUNKS = [(1, 256, 64), (512, 256, 64), (700, 256, 64), (365, 16, 1 << 20), (700, 64, 4)]


@pytest.mark.parametrize(("T", "size", "most"), CHUNKS)
@pytest.mark.parametrize("block_m", [16, 128])
def test_two_launches(
    T: int, size: int, most: int, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of(size, monkeypatch, most)
    ids = draw(T, 3, -2, 14)
    plan = routing.plan(ids, None, num_experts=11, block_m=block_m, is_inverse_wanted=True)
    assert_plan(plan, ids, num_experts=11, block_m=block_m)
    alone = routing.plan(ids, None, num_experts=11, block_m=block_m)
    assert alone.inverse is None
    assert_plan(alone, ids, num_experts=11, block_m=block_m)


@pytest.mark.parametrize("experts", [1, 128, 130, 1000])
@pytest.mark.parametrize("spread", ["random", "all on the last", "none"])
def test_experts_of_two_launches(
    experts: int, spread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_of(128, monkeypatch)
    ids = draw(300, 4, 0, experts).to(torch.int32)
    if spread != "random":
        ids.fill_(experts - 1 if spread == "all on the last" else experts)
    plan = routing.plan(ids, None, num_experts=experts, block_m=32, is_inverse_wanted=True)
    assert_plan(plan, ids, num_experts=experts, block_m=32)


def test_mapped_strided_ids_of_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(64, monkeypatch)
    ids = draw(3, 500, -2, 14).T
    # 2**32 + 1 would be expert 1 if its upper half were lost.
    ids[7, 1] = 2**32 + 1
    known = torch.tensor([3, -1, 0, 9, 1, 2, 3, 4, 5, 6, 2**40, 1])
    plan = routing.plan(ids, known, num_experts=7, block_m=16, is_inverse_wanted=True)
    assert_plan(plan, ids, num_experts=7, block_m=16, expert_map=known)


def test_many_contributions_take_two_launches() -> None:
    """As they come: a limit of 8192, chunks of 1024, the last of 2."""
    for T in (4096, 4097):
        ids = draw(T, 2, 0, 60)
        plan = routing.plan(ids, None, num_experts=60, block_m=64)
        assert_plan(plan, ids, num_experts=60, block_m=64)


def test_a_chunk_grows_where_their_number_is_bounded() -> None:
    assert [routing.most_chunks(experts) for experts in (1, 128, 256, 1024)] == [256, 256, 128, 64]


@pytest.mark.parametrize("word", ["token", "none"])
def test_no_result_depends_on_the_order(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several blocks put an expert's contributions into an order of their own."""
    case = problem(1, T=70, E=3, K=2, activation_quant=word)
    call = ExpertsArguments(*case.args, **case.options)
    expected = eager.experts(call)
    stable = routing.plan(call.topk_ids, None, num_experts=3, block_m=16)
    chunks_of(16, monkeypatch, 3)
    other = routing.plan(call.topk_ids, None, num_experts=3, block_m=16)
    assert not torch.equal(stable.order, other.order)
    assert torch.equal(eager.experts(call), expected)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0, 11), (-2, 14), (-3, 0)])
def test_progress_is_as_many_zeros_as_are_looked_at(
    low: int, high: int, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tickets and a count for each tile; what lies behind is nobody's."""
    if is_split:
        chunks_of(64, monkeypatch, most=4)
    ids = draw(300, 3, low, high)
    plan = routing.plan(ids, None, num_experts=11, block_m=16, is_progress_wanted=True)
    assert plan.progress is not None and len(plan.progress) == len(plan.tiles) + 1
    looked_at = 2 + int(plan.tiles[0, 0])
    assert not plan.progress[:looked_at].any()
    assert plan.progress[looked_at:].all()
