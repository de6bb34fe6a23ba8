"""The command line: what the parser takes, refuses and runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import int8moe_compile.hf  # noqa: F401  so that INT8 checkpoints load
from int8moe_compile import cli, demo


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[demo.Options] = []
    monkeypatch.setattr(demo, "run", ran.append)
    assert cli.main(["demo", "--device", "cpu"]) == 0
    assert cli.main(["demo", "--all", "--windows", "3", "--device", "cpu"]) == 0
    assert ran == [demo.Options(), demo.Options(every_scheme=True, windows=3)]
    assert ran[0].schemes == ("w8a8",)
    assert ran[1].schemes == ("w8a8", "w8a8_tensor", "w8a8_static", "w8a16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--windows", "0"], "wanted a positive number, got 0"),
        (["demo", "--windows", "many"], "wanted a positive number, got many"),
        (["demo", "--device", "gpu"], "wanted a device like cpu or cuda:0, got gpu"),
        (["explain", "folder", "--device", ""], "wanted a device like cpu or cuda:0, got"),
        (["demo", "extra"], "unrecognized arguments: extra"),
        (["quantize", "source"], "DST"),
        (["quantize", "source", "target", "--scheme", "w4a16"], "invalid choice: 'w4a16'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_module_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "int8moe_compile", "--help"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("usage: int8moe ")
    assert "demo" in ran.stdout


LAYERS = [f"model.layers.{index}.mlp.experts" for index in range(4)]


def table_rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines() if line.startswith("model.layers.")]


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static"])
def test_explain_lists_every_layer(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", str(demo.FOLDER), "--scheme", scheme, "--skip", LAYERS[2]]
    assert cli.main([*arguments, "--device", "cpu"]) == 0
    rows = table_rows(capsys.readouterr().out)
    assert [row[0] for row in rows] == LAYERS
    quantised = ["Qwen3MoeExperts", scheme, "yes", "cpu"]
    skipped = ["Qwen3MoeExperts", "-", "no", "-", "skipped:"]
    for index, row in enumerate(rows):
        wanted = skipped if index == 2 else quantised
        assert row[1 : 1 + len(wanted)] == wanted


@pytest.mark.parametrize("way", ["--verify", "--in-memory"])
def test_quantize_writes_a_checkpoint_that_loads_as_int8(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "int8"
    assert cli.main(["quantize", str(demo.FOLDER), str(target), "--scheme", "w8a16", way]) == 0
    assert [row[2] for row in table_rows(capsys.readouterr().out)] == ["w8a16"] * 4
    model = AutoModelForCausalLM.from_pretrained(target)
    weight = model.get_submodule(LAYERS[0]).gate_up_proj
    assert weight.dtype == torch.int8
    assert cli.main(["explain", str(target), "--device", "cpu"]) == 0
    rows = table_rows(capsys.readouterr().out)
    assert [row[2:4] for row in rows] == [["w8a16", "yes"]] * 4, "the checkpoint's own scheme"
    assert cli.main(["explain", str(target), "--device", "cpu", "--load"]) == 0
    loaded = table_rows(capsys.readouterr().out)
    assert [row[2:4] for row in loaded] == [["w8a16", "yes"]] * 4
    assert [row[-2] for row in loaded] == [row[-2] for row in rows], "bytes before"


class ByteTokenizer:
    """A tokenizer whose tokens are bytes."""

    def __call__(self, text: str, return_tensors: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([list(text.encode())]))

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def test_quantize_calibrates_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_tokenizer", lambda source: ByteTokenizer())
    text, target = tmp_path / "text", tmp_path / "int8"
    text.write_bytes((demo.FOLDER / "held_out.txt").read_bytes()[:700])
    rows = cli._rows(ByteTokenizer(), text, "cpu")
    assert [row.shape for row in rows] == [(1, 512), (1, 188)]
    arguments = ["--scheme", "w8a8_static", "--calibration", str(text)]
    assert cli.main(["quantize", str(demo.FOLDER), str(target), *arguments]) == 0
    assert (target / "tokenizer.json").exists()
    experts = AutoModelForCausalLM.from_pretrained(target).get_submodule(LAYERS[3])
    scales = [value for name, value in experts.named_buffers() if "input_scale" in name]
    scales += [value for name, value in experts.named_parameters() if "input_scale" in name]
    assert len(scales) == 2
    assert all(0 < scale.item() < 1 for scale in scales)


def test_faults_of_the_user_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text = str(demo.FOLDER), str(demo.FOLDER / "held_out.txt")
    (tmp_path / "file").touch()
    static = ["--scheme", "w8a8_static"]
    cases = {
        "DST: wanted a new or empty folder": ["quantize", source, str(tmp_path)],
        "--calibration: ": ["quantize", source, str(tmp_path / "a"), "--calibration", text],
        "--calibration: wanted": ["quantize", source, str(tmp_path / "b"), *static],
        "windows: wanted": ["demo", "--windows", "9999", "--device", "cpu"],
    }
    for message, arguments in cases.items():
        assert cli.main(arguments) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"int8moe: {message}")
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("command", ["demo", "bench", "quantize", "explain"])
def test_devices_that_are_not_there_are_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(demo.FOLDER), tmp_path / "int8"
    more = {"quantize": [source, str(target)], "explain": [source, "--load"]}
    for device in ("meta", "cuda:4095"):
        assert cli.main([command, *more.get(command, []), "--device", device]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"int8moe: --device: {device} cannot be used here: ")
    assert not target.exists()


def damaged(folder: Path, damage: Callable[[Path], Any]) -> str:
    """Return a copy of the demo's checkpoint after a damage was done to it."""
    copy = folder / "damaged"
    shutil.copytree(demo.FOLDER, copy)
    damage(copy)
    return str(copy)


def truncate(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])


def set_config(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, ".safetensors: truncated or corrupt"),
        (set_config(vocab_size=5), "wanted tensors of the shapes that its config.json implies"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: wanted a mapping"),
        (set_config(quantization_config=5), "quantization_config: wanted a mapping, got 5"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    damage: Callable[[Path], Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = damaged(tmp_path, damage), tmp_path / "int8"
    for arguments in (
        ["explain", source, "--load", "--device", "cpu"],
        ["quantize", source, str(target), "--in-memory"],
    ):
        assert cli.main(arguments) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"int8moe: {source}") and message in error
        assert not target.exists()


def test_programming_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(["explain", str(demo.FOLDER), "--load", "--device", "cpu"])


def test_a_source_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(source: str, **options: Any) -> None:
        raise OSError(f"{source} is nowhere\nand more about it")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", offline)
    (tmp_path / "file").touch()
    cases = {
        str(tmp_path / "none"): "wanted a checkpoint folder, got none: there is no such folder",
        str(tmp_path / "file"): "wanted a checkpoint folder, got a file",
        "no_such/folder": "there is no such folder; taken for a hub name: no_such/folder is no",
    }
    for source, message in cases.items():
        assert cli.main(["explain", source, "--device", "cpu"]) == 1
        assert capsys.readouterr().err.startswith(f"int8moe: {source}: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ", which is empty"),
        (b" \n", ", which is empty"),
        (b"\xff\xfe\x00", ": 'utf-8' codec can't decode"),
    ],
)
def test_a_calibration_text_without_text(
    content: bytes,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "_tokenizer", lambda source: ByteTokenizer())
    text, target = tmp_path / "text", tmp_path / "int8"
    text.write_bytes(content)
    arguments = ["--scheme", "w8a8_static", "--calibration", str(text)]
    assert cli.main(["quantize", str(demo.FOLDER), str(target), *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("int8moe: --calibration: wanted a text") and f"{text}{message}" in error
    assert not target.exists()


def test_a_calibration_text_without_tokens(tmp_path: Path) -> None:
    def tokenizer(text: str, return_tensors: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.empty(1, 0))

    (tmp_path / "text").write_text("?")
    with pytest.raises(ValueError, match=r"--calibration: wanted a text with tokens, got .*text"):
        cli._rows(tokenizer, tmp_path / "text", "cpu")


WAYS = pytest.mark.parametrize("way", [[], ["--in-memory"]])


@WAYS
def test_skipping_all_experts_is_refused(
    way: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "int8"
    for patterns in (["*"], ["model.layers.[01]", "*.2.*", "*.3.mlp"]):
        skip = [word for pattern in patterns for word in ("--skip", pattern)]
        assert cli.main(["quantize", str(demo.FOLDER), str(target), *skip, *way]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("int8moe: --skip: wanted some experts left to quantise, got ")
        assert all(repr(pattern) in error for pattern in patterns)
        assert not target.exists()
    assert cli.main(["quantize", str(demo.FOLDER), str(target), *skip[:-2], *way]) == 0


@WAYS
def test_a_quantised_source_is_refused(
    way: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(tmp_path / "int8"), tmp_path / "again"
    assert cli.main(["quantize", str(demo.FOLDER), source]) == 0
    assert cli.main(["quantize", source, str(target), *way]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith("wanted a float checkpoint, got one with a quantization_config")
    assert not target.exists()
    load = ["--load"] if way else []
    assert cli.main(["explain", source, "--skip", "*", "--device", "cpu", *load]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        error == f"int8moe: --skip: wanted none for {source}, which is quantised already, got ['*']"
    )


@WAYS
def test_a_target_inside_the_source_is_refused(
    way: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(damaged(tmp_path, lambda folder: None))
    before = sorted(source.rglob("*"))
    (tmp_path / "link").symlink_to(source)
    for target in (source, source / "sub", source / "sub" / "sub", tmp_path / "link" / "sub"):
        assert cli.main(["quantize", str(source), str(target), *way]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("int8moe: DST: wanted a folder apart from SRC, got ")
    assert cli.main(["quantize", str(source), str(tmp_path), *way]) == 1
    assert "DST: wanted a folder apart from SRC" in capsys.readouterr().err
    assert sorted(source.rglob("*")) == before
