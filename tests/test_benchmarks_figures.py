"""Figures of the README and docs/performance.md, against the raw results they were taken from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
# How a sentence of gains begins, what was measured before and after, of whom.
GAINS = {
    "Asynchronous products and faster quantising": (
        "h200_before_wgmma",
        "h200_first_wgmma",
        "int8",
    ),
    "What a tile needs read before its products": ("h200_first_wgmma", "h200", "int8"),
    "Both products in one launch, compiled": ("h200", "h200_stream", "int8"),
    "Weight-only experts at one token": ("h200", "h200_decode", "w8a16"),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    text = (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)["rows"]
    return found


# Of a row in more than one run, the last one's.
ROWS = list(
    {
        (row["shape"], row["tokens"]): row
        for name in ("h200", "h200_stream", "h200_decode")
        for row in rows_of(name)
    }.values()
)
CONTESTANTS = ("int8", "int8 eager", "static", "w8a16", "hf bf16")


def of(shape: str, tokens: int) -> dict[str, Any]:
    return next(row for row in ROWS if (row["shape"], row["tokens"]) == (shape, tokens))


def rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def test_the_table_is_that_of_the_results() -> None:
    """Rows in any order, every one of them, each figure rounded from its result."""
    written = re.findall(r"^\| (\S+, \d+ \|.*\|)$", PERFORMANCE, re.M)
    expected = []
    for row in ROWS:
        cells = [f"{row['shape']}, {row['tokens']}", rounded(row["floor"]), rounded(row["target"])]
        cells += [rounded(row.get(name)) for name in CONTESTANTS]
        cells.append(f"{row['hf bf16'] / row['int8']:.2f}")
        humming = row.get("humming")
        cells += [rounded(humming), "-" if humming is None else f"{humming / row['int8']:.2f}"]
        expected.append(" | ".join(cells) + " |")
    assert sorted(written) == sorted(expected)


def test_what_is_said_of_the_table() -> None:
    gains = [row["hf bf16"] / row["int8"] for row in ROWS]
    assert f"w8a8 is {min(gains):.2f} to {max(gains):.2f} times as fast as HF bf16" in PERFORMANCE
    few = [r["hf bf16"] / r["w8a16"] for r in ROWS if "w8a16" in r and r["tokens"] <= 64]
    assert f"w8a16 is {min(few):.1f} to {max(few):.1f} times as fast up to 64" in PERFORMANCE
    met = {(r["shape"], r["tokens"]) for r in ROWS if r["target"] and r["int8"] <= r["target"]}
    assert met == {
        *(("mixtral-8x7b", tokens) for tokens in (16, 4096, 16384)),
        *(("qwen3-30b-a3b", tokens) for tokens in (16, 64)),
        ("qwen1.5-moe-a2.7b", 1),
        ("deepseek-v3", 1),
    }
    words = (
        "Targets met or beaten: Qwen3 16 and 64; Qwen1.5 1; Mixtral 16, 4096 and 16384; "
        "DeepSeek-V3 1."
    )
    assert words in PERFORMANCE
    over = {
        (r["shape"].split("-")[0], r["tokens"]): f"{100 * (r['int8'] / r['target'] - 1):.1f}"
        for r in ROWS
        if r["target"] and r["int8"] > 1.1 * r["target"]
    }
    assert over == {("qwen1.5", 4096): "10.5"}
    assert "Over: Qwen1.5 4096 by 10.5 %." in PERFORMANCE
    near = {
        (r["shape"].split("-")[0], r["tokens"])
        for r in ROWS
        if r["target"] and r["target"] < r["int8"] <= 1.05 * r["target"]
    }
    assert near == {
        *(("qwen3", tokens) for tokens in (1, 256, 16384)),
        ("qwen1.5", 64),
        *(("mixtral", tokens) for tokens in (1, 256)),
        *(("deepseek", tokens) for tokens in (64, 4096)),
    }


def test_what_is_said_of_humming() -> None:
    behind = {
        (r["shape"], r["tokens"]): r["humming"] / r["int8"] - 1 for r in ROWS if r.get("humming")
    }
    ahead = {key: 100 * (1 / (1 + share) - 1) for key, share in behind.items() if share < 0}
    assert list(ahead) == [("mixtral-8x7b", 64)]
    rest = [100 * share for key, share in behind.items() if key not in ahead]
    said = f"ahead at Mixtral, 64 tokens, by {ahead['mixtral-8x7b', 64]:.0f} %, and behind by "
    assert f"{said}{min(rest):.0f} to {max(rest):.0f} % elsewhere" in PERFORMANCE


@pytest.mark.parametrize("sentence", GAINS)
def test_what_is_said_of_the_gains(sentence: str) -> None:
    """Both ends of each arrow."""
    *runs, contestant = GAINS[sentence]
    before, after = (rows_of(name) for name in runs)
    begin = PERFORMANCE.index(sentence)
    text = PERFORMANCE[begin : PERFORMANCE.index("\n\n", begin)]
    found = 0
    for name, numbers in re.findall(r"([A-Z][\w.-]+|gpt-oss), (\d+(?:[^;.A-Z]| tokens)*)", text):
        for tokens, old, new in re.findall(r"(\d+)(?: tokens|:)? (\d+) -> (\d+)", numbers):
            ends = [
                [
                    rounded(r[contestant])
                    for r in rows
                    if r["shape"].startswith(name.lower()) and r["tokens"] == int(tokens)
                ]
                for rows in (before, after)
            ]
            assert ends == [[old], [new]], (name, tokens)
            found += 1
    assert found == text.count("->")


def test_what_is_said_of_weight_only_experts() -> None:
    behind = [100 * (r["w8a16"] / r["int8"] - 1) for r in ROWS if r["tokens"] == 1]
    assert f"w8a16 at 1 token is {min(behind):.0f} to {max(behind):.0f} % behind" in PERFORMANCE
    assert sorted(f"{share:.0f}" for share in behind if share > 9) == ["15", "15"]
    behind = [100 * (r["w8a16"] / r["int8"] - 1) for r in ROWS if r["tokens"] == 64]
    assert f"At 64 tokens it is {min(behind):.0f} to {max(behind):.0f} % behind" in PERFORMANCE


def test_what_is_said_of_eager_calls() -> None:
    written = re.findall(r"^\| (\d+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", PERFORMANCE, re.M)
    expected = [
        (f"{row['tokens']}", f"{row['repeated']}", rounded(row["first"]), rounded(row["neither"]))
        for row in rows_of("h200_overhead")
    ]
    assert len(expected) == 5 and written == expected


def test_what_the_readme_says() -> None:
    row, gains = of("qwen3-30b-a3b", 64), [r["hf bf16"] / r["int8"] for r in ROWS]
    assert f"takes {row['int8']:.0f} us for 64 tokens" in README
    assert f"takes {row['hf bf16']:.0f} us in bfloat16" in README
    said = (
        f"[all {len(ROWS)} rows](docs/performance.md): {min(gains):.1f} to {max(gains):.1f} times"
    )
    assert said in README
    olmoe, mixtral = of("olmoe-1b-7b", 4096), of("mixtral-8x7b", 4096)
    assert f"{olmoe['hf bf16'] / olmoe['w8a16']:.1f}" == "1.0"
    assert "from as fast as bfloat16 (OLMoE)" in README
    assert f"{mixtral['w8a16'] / mixtral['hf bf16']:.1f} times as slow (Mixtral)" in README
