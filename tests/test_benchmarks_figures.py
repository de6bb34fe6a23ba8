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
    "The same for up to 72 rows an expert": ("h200", "h200_tall", "int8"),
    "Results kept in L2": ("h200_stream", "h200_tall", "int8"),
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
# Rows whose kernels changed since, of the run after that.
CHANGED = {
    "qwen3-30b-a3b": (16, 64, 256, 1024),
    "qwen1.5-moe-a2.7b": (64, 1024),
    "mixtral-8x7b": (16,),
    "deepseek-v3": (64,),
    "olmoe-1b-7b": (16, 64, 256),
    "gpt-oss-20b": (16, 64, 256),
}
NEWER = [row for row in rows_of("h200_tall") if row["tokens"] in CHANGED[row["shape"]]]
LATEST = list({(row["shape"], row["tokens"]): row for row in (*ROWS, *NEWER)}.values())


def of(shape: str, tokens: int, rows: list[dict[str, Any]] = ROWS) -> dict[str, Any]:
    return next(row for row in rows if (row["shape"], row["tokens"]) == (shape, tokens))


def table(columns: int) -> list[str]:
    """Return the rows of the table of layers that has so many columns."""
    rows = re.findall(r"^\| (\S+, \d+ \|.*\|)$", PERFORMANCE, re.M)
    return [row for row in rows if row.count("|") == columns]


def rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def test_the_table_is_that_of_the_results() -> None:
    """Rows in any order, every one of them, each figure rounded from its result."""
    written = table(11)
    expected = []
    for row in ROWS:
        cells = [f"{row['shape']}, {row['tokens']}", rounded(row["floor"]), rounded(row["target"])]
        cells += [rounded(row.get(name)) for name in CONTESTANTS]
        cells.append(f"{row['hf bf16'] / row['int8']:.2f}")
        humming = row.get("humming")
        cells += [rounded(humming), "-" if humming is None else f"{humming / row['int8']:.2f}"]
        expected.append(" | ".join(cells) + " |")
    assert sorted(written) == sorted(expected)


def test_the_table_of_rows_that_changed() -> None:
    written = table(7)
    expected = []
    for row in NEWER:
        humming = row.get("humming")
        cells = [f"{row['shape']}, {row['tokens']}", rounded(row["target"])]
        cells += [f"{row[name]:.1f}" for name in ("int8", "int8 eager")]
        cells += [rounded(row.get("static")), rounded(humming)]
        cells.append("-" if humming is None else f"{humming / row['int8']:.2f}")
        expected.append(" | ".join(cells) + " |")
    assert sorted(written) == sorted(expected) and len(expected) == sum(map(len, CHANGED.values()))


def test_what_is_said_of_the_other_rows_of_that_run() -> None:
    before = {(row["shape"], row["tokens"]): row["int8"] for row in ROWS}
    rest = {
        (row["shape"], row["tokens"]): row["int8"]
        for row in rows_of("h200_tall")
        if row["tokens"] not in CHANGED[row["shape"]]
    }
    slower = {key: 100 * (time / before[key] - 1) for key, time in rest.items()}
    said = (
        f"the same launches up to {max(slower.values()):.0f} % slower "
        f"(Mixtral, 4096 tokens {rest['mixtral-8x7b', 4096]:.0f} us, "
        f"Qwen3, 1 token {rest['qwen3-30b-a3b', 1]:.1f}) "
        f"and no more than {-min(slower.values()):.0f} % faster"
    )
    assert said in PERFORMANCE


def test_what_is_said_of_the_table() -> None:
    gains = [row["hf bf16"] / row["int8"] for row in ROWS]
    assert f"w8a8 is {min(gains):.2f} to {max(gains):.2f} times as fast as HF bf16" in PERFORMANCE
    few = [r["hf bf16"] / r["w8a16"] for r in ROWS if "w8a16" in r and r["tokens"] <= 64]
    assert f"w8a16 is {min(few):.1f} to {max(few):.1f} times as fast up to 64" in PERFORMANCE


def test_what_is_said_of_targets() -> None:
    over = {
        (row["shape"].split("-")[0], row["tokens"]): 100 * (row["int8"] / row["target"] - 1)
        for row in LATEST
        if row["target"]
    }
    assert {key for key, share in over.items() if share <= 0} == {
        *(("qwen3", tokens) for tokens in (64, 256)),
        *(("qwen1.5", tokens) for tokens in (1, 64)),
        *(("mixtral", tokens) for tokens in (16, 4096, 16384)),
        ("deepseek", 1),
    }
    assert {key for key, share in over.items() if 0 < share <= 5} == {
        *(("qwen3", tokens) for tokens in (1, 16, 1024, 16384)),
        ("qwen1.5", 1024),
        *(("mixtral", tokens) for tokens in (1, 256)),
        *(("deepseek", tokens) for tokens in (64, 4096)),
    }
    assert {key for key, share in over.items() if 5 < share <= 10} == {
        ("qwen3", 4096),
        ("deepseek", 1024),
    }
    beyond = {key: f"{share:.1f}" for key, share in over.items() if share > 10}
    assert beyond == {("qwen1.5", 4096): "10.5"}
    words = (
        "Targets met or beaten: Qwen3 64 and 256; Qwen1.5 1 and 64; Mixtral 16, 4096 and 16384; "
        "DeepSeek-V3 1. Within 5 %: Qwen3 1, 16 (108.7; 107.5 before, on another GPU), 1024 and "
        "16384; Qwen1.5 1024; Mixtral 1 (98.1) and 256;\n  DeepSeek-V3 64 and 4096 (3800.9). "
        "Within 10 %: Qwen3 4096; DeepSeek-V3 1024. Over: Qwen1.5 4096 by 10.5 %."
    )
    assert words in PERFORMANCE
    left = "by more than 5 %: Qwen3 and Qwen1.5 at 4096 tokens, DeepSeek-V3 at 1024."
    assert left in PERFORMANCE
    written = re.search(r"Qwen3 1, 16 \(([\d.]+); ([\d.]+) before.*Mixtral 1 \(([\d.]+)\)", words)
    assert written is not None
    rows = [
        of("qwen3-30b-a3b", 16, LATEST),
        of("qwen3-30b-a3b", 16),
        of("mixtral-8x7b", 1),
    ]
    assert list(written.groups()) == [f"{row['int8']:.1f}" for row in rows]


def test_what_is_said_of_humming() -> None:
    behind = {
        (r["shape"], r["tokens"]): r["humming"] / r["int8"] - 1 for r in LATEST if r.get("humming")
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
