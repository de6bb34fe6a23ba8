"""int8moe bench: its table, its refusals, and that it times what it says."""

from __future__ import annotations

import pytest
import torch
from support import row_errors

from int8moe_compile import bench, cli
from int8moe_compile.ops import reference

SMALL = bench.BenchOptions(tokens=(3,), hidden=32, intermediate=16, experts=4, top_k=2)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take functions as they are where the command would compile them, without a peer."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(bench, "hugging_face", lambda _: None)
    monkeypatch.setattr(bench, "MEASURING_SECONDS", 0.01)


def test_a_row_for_each_size_and_word(uncompiled: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["token", "tensor", "static", "none"]
    sizes = ["--hidden", "32", "--intermediate", "16", "--experts", "4", "--top-k", "2"]
    arguments = ["bench", "--device", "cpu", "--tokens", "1", "8", *sizes, "--quant", *words]
    assert cli.main(arguments) == 0
    heading, titles, *rows = capsys.readouterr().out.splitlines()
    assert "E=4 K=2 H=32 I=16" in heading and titles.split()[:2] == ["tokens", "quant"]
    cells = [row.split() for row in rows]
    assert [row[:2] for row in cells] == [[size, word] for word in words for size in ("1", "8")]
    assert all(float(row[2]) > 0 and float(row[3]) > 0 and row[4:] == ["-", "-"] for row in cells)


def test_more_experts_per_token_than_experts_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "--experts", "2", "--top-k", "3"]) == 1
    assert "top_k" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "value", "named"),
    [
        ("--tokens", "99999999999999999999", "tokens"),
        ("--tokens", "9999999999999", "tokens"),
        ("--hidden", "9999999999", "hidden, intermediate, experts"),
        ("--intermediate", "9999999999", "hidden, intermediate, experts"),
        ("--experts", "9999999999999999999999", "hidden, intermediate, experts"),
    ],
)
def test_sizes_beyond_memory_are_refused(
    argument: str, value: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--device", "cpu", argument, value]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"int8moe: {named}: wanted sizes that fit the ") and value in line
    assert captured.out == ""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize(
    ("function", "named"), [("inputs", "tokens"), ("hugging_face", "hidden, intermediate, experts")]
)
def test_memory_that_runs_out_names_the_argument(
    error: Exception, function: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(bench, function, fail)
    with pytest.raises(ValueError, match=f"{named}: wanted sizes that fit the .* of cpu"):
        list(bench.run(SMALL))
    error = RuntimeError("a fault of ours")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        list(bench.run(SMALL))


def test_what_is_timed_is_the_layer_and_its_peer() -> None:
    layer, given = bench.Layer.random(SMALL), bench.inputs(SMALL, 3)
    weights = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    exact = reference.experts(given[0], *weights, *given[1:], precision=torch.float64)
    assert row_errors(layer.call("token")(*given), exact).max() < 0.02
    assert given[2].sort(dim=-1).values.diff(dim=-1).min() > 0  # distinct experts
    peer = bench.hugging_face(SMALL)
    assert peer is not None
    with torch.inference_mode():
        assert peer(*given).shape == exact.shape
