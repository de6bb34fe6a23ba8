"""The source that Inductor generates for both products in one launch; collected by itself only."""

from __future__ import annotations

import re
from typing import Any

import pytest
from generated import COMBINE, COUNT, PLACE, SCATTER, block, shapes
from generated_variants import deep_shapes, launched, programs
from inductor_source import generated_source, launch_order
from torch._inductor import config as inductor_config

from int8moe_compile.lowerings import tiles

CALL = r"torch\.ops\.int8moe\._stream\.default\((.*), \[(\d+), [\d, ]*\]\)$"


@pytest.mark.parametrize("T", [64, "T"])
def test_both_products_of_few_rows_are_one_call(T: int | str) -> None:
    """Behind what puts rows into order, ahead of the sum over what it writes."""
    source = generated_source(block(), deep_shapes(T), tokens=64)
    calls = [arguments for arguments, _ in re.findall(CALL, source, re.M)]
    assert len(calls) == (1 if T == 64 else 2)
    out = calls[-1].partition(",")[0]
    spread, combine = (
        [found.start() for found in re.finditer(rf"{name}\w*\.run\(", source)][-1]
        for name in ("spread_kernel", COMBINE)
    )
    assert out in source[combine : source.index("\n", combine)]
    assert source.rindex("int8moe._stream.default(") < combine
    if T == 64:
        assert spread < source.index("int8moe._stream.default(")
        assert launch_order(source)[-3:] == [PLACE, "spread_kernel", COMBINE]
        assert programs(calls[0], 64) > 0
        return
    for tokens, due in ((2, [True, False]), (32, [True, False]), (33, [False, True])):
        assert [programs(arguments, tokens) > 0 for arguments in calls] == due, tokens
        assert launched(source, tokens) == sorted([COUNT, SCATTER, "spread_kernel"])
    assert not any(programs(arguments, 5000) for arguments in calls)


# Of 24 experts, 4 a token: rows of the tile that both products in one launch have up to so many.
TALL_STEPS = ((48, 16), (144, 32), (300, 64), (432, 80))


def tall_shapes(T: int | str) -> list[Any]:
    inputs = shapes(T, K=4)
    sizes = (24, 1024, 512), (24, 1024), (24, 512, 512), (24, 512)
    inputs[3:7] = [(size, dtype) for size, (_, dtype) in zip(sizes, inputs[3:7], strict=True)]
    return inputs


@pytest.mark.parametrize("T", [240, 400, "T"])
def test_more_rows_have_taller_tiles(T: int | str) -> None:
    source = generated_source(block(), tall_shapes(T), tokens=400)
    calls = re.findall(CALL, source, re.M)
    rows = [int(found) for _, found in calls]
    if T != "T":
        assert rows == [64 if T == 240 else 80]
        return
    assert rows == [found for _, found in TALL_STEPS]
    for most, expected in TALL_STEPS:
        for tokens in (most - 1, most):
            due = [int(found) for arguments, found in calls if programs(arguments, tokens)]
            assert due == [expected], tokens
    assert not any(programs(arguments, 433) for arguments, _ in calls)


@pytest.mark.parametrize(
    ("T", "is_streamed"), [(40, False), (144, False), (145, True), (400, True)]
)
def test_tiles_are_compared_at_few_rows_only(
    T: int, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under max-autotune templates come before both products in one launch, up to 24 rows."""
    # Of one tile nothing is timed.
    monkeypatch.setattr(tiles, "candidates", lambda *args: (tiles.choose(*args),))
    for is_tuned in (False, True):
        with inductor_config.patch(max_autotune=is_tuned):
            source = generated_source(block(), tall_shapes(T), tokens=T)
        found = "int8moe._stream.default(" in source
        assert found == (is_streamed or not is_tuned)
