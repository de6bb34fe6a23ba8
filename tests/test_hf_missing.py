"""What a user sees where transformers is missing or too old."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import int8moe_compile
from int8moe_compile import cli, compat

VERBS = [
    "int8moe_compile.quantize_(torch.nn.Linear(4, 4))",
    "int8moe_compile.explain(torch.nn.Linear(4, 4))",
    'int8moe_compile.Int8MoeConfig("w8a8")',
]
WAY_OUT = r'5\.10 or newer, got {}; pip install "int8moe_compile\[hf\]"'


def test_without_transformers_every_verb_says_what_to_install() -> None:
    lines = ["import sys", "sys.modules['transformers'] = None", "import torch, int8moe_compile"]
    for verb in VERBS:
        lines += ["try:", f"    {verb}", "except ImportError as error:", "    print(error)"]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    message = (
        "transformers: wanted 5.10 or newer, got none; "
        'pip install "int8moe_compile[hf]" installs it'
    )
    assert ran.stdout.splitlines() == [message] * len(VERBS)


@pytest.mark.parametrize("version", ["4.57.3", "5.9.1", "5.9"])
def test_an_older_version_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ImportError, match=WAY_OUT.format(version)):
        int8moe_compile.quantize_(nn.Linear(4, 4))


@pytest.mark.parametrize("version", ["5.10.0", "5.10.0.dev0", "5.23.1", "6.0"])
def test_a_newer_version_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    compat.require_transformers()


def test_the_least_version_is_that_of_the_extra() -> None:
    least = ".".join(map(str, compat.LEAST_TRANSFORMERS))
    text = Path(__file__).parent.parent.joinpath("pyproject.toml").read_text(encoding="utf-8")
    assert f'hf = ["transformers>={least}"]' in text


@pytest.mark.parametrize("command", [["explain", "--load"], ["quantize", "--in-memory"]])
def test_the_command_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    source = tmp_path / "float"
    source.mkdir()
    (source / "config.json").write_text("{}")
    target = [str(tmp_path / "int8")] if command[0] == "quantize" else []
    assert cli.main([*command, str(source), *target]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("int8moe: transformers: wanted 5.10 or newer, got none")
