"""Launches of the asynchronous products, without a GPU: what is launched, prepared and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from int8moe_compile.lowerings import wgmma, wgmma_kernels

TILE = [128, 128, 128, 8, 1, 4, 3]


class Kernel:
    """Take launches and preparations down."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda **arguments: self.log.append((*grid, arguments["steps"], arguments["width"]))

    def run(self, *, warmup: bool, **arguments: Any) -> Any:
        assert warmup
        self.log.append("prepared")
        return self


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(wgmma_kernels, "wgmma_down_kernel", found)
    monkeypatch.setattr(wgmma, "_prepared", set())
    return found


def call(
    programs: int,
    w: torch.Tensor,
    tile: list[int] = TILE,
    rows: int = 64,
    *,
    is_early: bool = False,
    is_old: bool = True,
) -> None:
    """Launch the second product of 64 rows of 400 codes into 64 of 528 values."""
    codes = torch.zeros(rows, 400, dtype=torch.int8)
    out, weights = torch.zeros(64, 528, dtype=torch.bfloat16), torch.zeros(32, 2)
    numbers = torch.zeros(64, dtype=torch.int32)
    scale, w_scale, tiles = torch.zeros(64), torch.zeros(4, 528), numbers.view(-1, 2)
    is_per_row, is_weighted = True, True
    timing = (is_early, is_old, programs)
    rest = (tiles, numbers, weights, is_per_row, is_weighted, *timing, tile)
    wgmma.launch_down(out, codes, scale, w, w_scale, None, *rest)


def test_what_is_not_due_is_prepared_once(kernel: Kernel) -> None:
    w, other = torch.zeros(2, 4, 528, 400, dtype=torch.int8)
    for _ in range(3):
        call(0, w)
    assert kernel.log == ["prepared"]
    call(0, other)
    call(0, w, [*TILE[:-1], 4])
    assert kernel.log == ["prepared"] * 3
    # One for launches that come early, and one whose weights are new then.
    for _ in range(2):
        call(0, w, is_early=True)
        call(0, w, is_early=True, is_old=False)
    assert kernel.log == ["prepared"] * 5
    call(5, w)
    call(7, w)
    assert kernel.log[5:] == [(5, 4, 528), (7, 4, 528)]


def test_shapes_that_do_not_fit_are_refused(kernel: Kernel) -> None:
    w = torch.zeros(4, 528, 400, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"rows, out: wanted the shapes \(\(63, 400\), \(63, 528"):
        call(5, w, rows=63)
    assert kernel.log == []
