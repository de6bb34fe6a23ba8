"""The demo: its perplexity by hand, its data, its output, and every scheme on a trained model."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import int8moe_compile
from int8moe_compile import demo
from int8moe_compile.schemes import SCHEMES

BOUND_PERCENT = {"w8a8": 0.5, "w8a8_tensor": 0.5, "w8a8_static": 0.5, "w8a16": 0.2}


class Bigram:
    """A model of two tokens that gives 1 probability 3/4 after 0, and 1/4 after 1."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.calls += 1
        one = torch.where(input_ids == 0, 0.75, 0.25)
        return SimpleNamespace(logits=torch.stack([1 - one, one], dim=-1).log())


def test_perplexity_of_a_bigram_by_hand() -> None:
    # 0->1: 3/4, 1->1: 1/4, 1->0: 3/4 | 0->0: 1/4, 0->1: 3/4, 1->1: 1/4
    rows = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])
    expected = ((3 / 4) ** 3 * (1 / 4) ** 3) ** (-1 / 6)
    model = Bigram()
    together = demo.score(model, [rows], scheme="bigram", mode="eager")
    assert math.isclose(together.perplexity, expected, rel_tol=1e-6)
    assert model.calls == 2, "the first call is made once more, to warm up"
    apart = demo.score(model, rows.split(1), scheme="bigram", mode="eager")
    assert math.isclose(apart.perplexity, together.perplexity, rel_tol=1e-12)
    assert apart.seconds_per_token > 0


def test_uniform_logits_have_the_vocabulary_as_perplexity() -> None:
    targets = torch.randint(256, (2, 5))
    total = demo.negative_log_likelihood(torch.zeros(2, 5, 256), targets)
    assert math.isclose(math.exp(total / 10), 256, rel_tol=1e-9)


def test_windows_predict_every_byte_once() -> None:
    windows = demo.held_out_windows()
    text = (demo.FOLDER / "held_out.txt").read_bytes()
    assert len(windows) == (len(text) - 1) // demo.CONTEXT
    predicted = bytes(windows[:, 1:].flatten().tolist())
    assert predicted == text[1 : 1 + len(predicted)]


def test_scored_and_calibration_windows_share_nothing() -> None:
    windows = torch.arange(100).unsqueeze(1)
    scored, spare = demo.split_windows(windows, 7)
    assert scored.flatten().tolist() == [0, 14, 28, 42, 57, 71, 85]
    assert len(spare) == demo.CALIBRATION_WINDOWS
    assert not set(scored.flatten().tolist()) & set(spare.flatten().tolist())
    for wrong in (0, 85, 101):
        with pytest.raises(ValueError, match=f"windows: wanted 1 to 84, got {wrong}"):
            demo.split_windows(windows, wrong)


def test_data_is_what_its_report_describes() -> None:
    report = json.loads((demo.FOLDER / "training.json").read_text())
    weights = demo.FOLDER / "model.safetensors"
    assert report["corpus"]["held_out_bytes"] == (demo.FOLDER / "held_out.txt").stat().st_size
    assert weights.stat().st_size < 10_000_000
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == (
        "e5d4110c5bca973eb4d506625f2a53bca2cd10b6c8b4f8ecb7628114d274a1b4"
    )
    assert report["held_out_perplexity_with_experts_zeroed"] > 10 * report["held_out_perplexity"]


def test_bytes_count_parameters_and_buffers() -> None:
    module = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    module.register_buffer("codes", torch.zeros(5, dtype=torch.int8))
    assert demo.model_bytes(module) == 2 * (6 + 2) + 5


def test_table_compares_with_bf16() -> None:
    row = demo.Score("w8a8", "compiled", 2.01, 2.5e-6)
    line = demo.table_row(row, perplexity=2.0, seconds_per_token=4e-6)
    assert line.split() == ["w8a8", "compiled", "2.0100", "+0.500%", "2.5", "400,000", "1.60x"]
    assert len(line) == len(demo.table_heading())


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    missing = demo.missing_for_compiling("cpu")
    assert missing is not None and "C++ compiler" in missing
    assert demo.missing_for_compiling("cuda") is None
    compiler = tmp_path / "mine"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", "mine -m64")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    missing = demo.missing_for_compiling("cpu")
    assert missing is not None and "Python.h" in missing
    (tmp_path / "Python.h").touch()
    assert demo.missing_for_compiling("cpu") is None


def test_without_a_compiler_the_eager_rows_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "missing_for_compiling", lambda device: "a C++ compiler (none)")
    demo.run(demo.Options(windows=1, batch=1, new_tokens=4))
    printed = capsys.readouterr().out
    assert "no compiled rows: torch.compile needs a C++ compiler (none)" in printed
    rows = [line.split() for line in printed.splitlines()]
    for scheme in ("bf16", "w8a8"):
        (row,) = [row for row in rows if row[:2] == [scheme, "eager"]]
        assert 1.2 < float(row[2]) < 4
    assert not any("compiled" in row for row in rows if row[:1] == ["w8a8"])
    # 16 experts of (2*64*192 + 192*64) weights in 4 layers: 2 bytes each, then 1 and fp32 scales.
    (experts,) = [row for row in rows if row[:2] == ["w8a8", "experts"]]
    assert experts[2:] == ["4,718,592", "2,441,216", "52%"]
    layers = [row for row in rows if row and row[0].startswith("model.layers.")]
    assert [row[0] for row in layers] == [f"model.layers.{i}.mlp.experts" for i in range(4)]
    assert all(row[1:5] == ["Qwen3MoeExperts", "w8a8", "yes", "cpu"] for row in layers)
    assert "ms/token" in printed


@pytest.mark.slow
def test_every_scheme_keeps_its_bound_and_compiled_equals_eager() -> None:
    model = demo.load()
    scored, spare = demo.split_windows(demo.held_out_windows(), 32)
    batches = scored.split(4)
    baseline = demo.score(model, batches, scheme="bf16", mode="eager").perplexity
    assert baseline < 2.6, "the checkpoint is the trained one"
    for scheme in SCHEMES:
        calibration = None
        if scheme == "w8a8_static":
            calibration = [{"input_ids": rows} for rows in spare.split(4)]
        quantised = int8moe_compile.quantize_(copy.deepcopy(model), scheme, calibration=calibration)
        eager = demo.score(quantised, batches, scheme=scheme, mode="eager").perplexity
        change = 100 * abs(eager / baseline - 1)
        assert change < BOUND_PERCENT[scheme], f"{scheme}: {change:.3f} % from bf16"
        with int8moe_compile.enabled():
            inductor = demo.score(
                demo.compiled(quantised), batches, scheme=scheme, mode="compiled"
            ).perplexity
        assert abs(inductor / eager - 1) < 1e-3, f"{scheme}: {inductor} compiled, {eager} eager"
