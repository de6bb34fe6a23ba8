"""The evaluation recipe: its tasks on a local file, its tokenizer, its thresholds, a whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "evaluate_checkpoint.py"
DEMO = ROOT / "int8moe_compile" / "demo_data"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def text(characters: int = 9000) -> str:
    return (DEMO / "held_out.txt").read_text()[:characters]


def test_choices_are_places_of_the_text():
    from evaluation_tasks import CHOICES, CONTEXT, CONTINUATION, choice_rows

    rows = choice_rows(text(), 50)
    assert rows == choice_rows(text(), 50) != choice_rows(text(), 50, seed=1)
    for row in rows:
        right = row["choices"][row["label"]]
        assert len(row["context"]) == CONTEXT and row["context"] + right in text()
        assert len(row["choices"]) == CHOICES
        assert {len(choice) for choice in row["choices"]} == {CONTINUATION}
    assert {row["label"] for row in rows} == set(range(CHOICES))
    with pytest.raises(ValueError, match="text: wanted 896 characters, got 5"):
        choice_rows("short", 1)


def test_pages_are_the_whole_text(tmp_path: Path):
    from evaluation_tasks import local_tasks, perplexity_rows

    assert "".join(row["page"] for row in perplexity_rows(text(), 1000)) == text()
    (tmp_path / "text").write_text(text())
    tasks = local_tasks(tmp_path / "text", tmp_path, choices=7)
    files = [Path(task["dataset_kwargs"]["data_files"]["test"]) for task in tasks]
    assert [len(file.read_text().splitlines()) for file in files] == [2, 7]
    assert all(json.loads(line) for file in files for line in file.read_text().splitlines())


def test_ids_are_bytes():
    from evaluation_tasks import byte_tokenizer

    tokenizer = byte_tokenizer()
    for words in (text(), "".join(map(chr, range(1, 0x2000))), "a  b\n\n\tc \u0100 \U0001f600"):
        ids = tokenizer(words)["input_ids"]
        assert ids == list(words.encode())
        assert tokenizer.decode(ids) == words
    assert (tokenizer.eos_token_id, len(tokenizer)) == (0, 256)


def test_thresholds_are_read_strictly():
    from evaluate_checkpoint import below, threshold

    name = "gsm8k/exact_match,strict-match"
    assert threshold(f"{name}=0.50") == (name, 0.5)
    for wrong in ("acc=0.5", "a/b=much", "a/b", ""):
        with pytest.raises(SystemExit, match="wanted TASK/METRIC=VALUE"):
            threshold(wrong)
    assert not below({name: 0.5}, name, 0.5)
    assert below({name: 0.49}, name, 0.5) and below({}, name, 0.5)
    assert below({name: float("nan")}, name, 0.5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra eval (lm-eval)")
@pytest.mark.parametrize("scheme", ["none", "w8a8"])
def test_the_demo_is_evaluated_without_a_network(tmp_path: Path, scheme: str):
    (tmp_path / "text").write_text(text())
    words = [sys.executable, str(SCRIPT), str(DEMO), "--text", str(tmp_path / "text")]
    words += ["--scheme", scheme, "--bytes", "--max-length", "512", "--choices", "6"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    options = {"env": environment, "capture_output": True, "text": True}
    limits = ["--at-least", "local_continuation/acc=0.5"]
    good = subprocess.run([*words, *limits], **options)
    assert good.returncode == 0, good.stderr
    results = dict(line.split() for line in good.stdout.splitlines())
    # Four choices, one of them right; a model that knows nothing has 256 for a byte.
    assert float(results["local_continuation/acc"]) > 0.25
    assert 2.0 < float(results["local_perplexity/byte_perplexity"]) < 2.5
    kind = "float" if scheme == "none" else scheme
    assert f"4 experts modules: {kind}" in good.stderr
    if scheme == "none":
        limits = ["--at-least", "local_continuation/acc=1.01"]
        bad = subprocess.run([*words, *limits], **options)
        assert bad.returncode == 1 and "wanted at least 1.01, got 0." in bad.stderr
