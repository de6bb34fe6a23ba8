"""The converter: the same bits as quantize_, resumable after any interruption, verified."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import build

from int8moe_compile.checkpoint_explain import explain_directory
from int8moe_compile.checkpoint_files import INDEX
from int8moe_compile.convert import PARTIAL, STATE, convert_checkpoint, verify_conversion
from int8moe_compile.convert_plan import plan_conversion
from int8moe_compile.errors import CheckpointError
from int8moe_compile.hf import find_experts, record_of
from int8moe_compile.quantization import quantize_
from int8moe_compile.schemes import parse_scheme

ROOT = Path(__file__).resolve().parent.parent
W8A8 = parse_scheme("w8a8")


def saved(directory: Path, family: str = "qwen3_moe", shard: str = "60KB", **options) -> Path:
    """Write a float checkpoint in several files."""
    build(family, **options).save_pretrained(directory, max_shard_size=shard)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_tensor", "w8a16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h", "granitemoe"])
def test_it_writes_what_quantize_makes(tmp_path: Path, family: str, scheme: str):
    source = saved(tmp_path / "float", family)
    target = convert_checkpoint(source, tmp_path / "int8", scheme, verify=True, progress=False)
    kind = type(build(family))
    converted = kind.from_pretrained(target).state_dict()
    wanted = quantize_(kind.from_pretrained(source), scheme).state_dict()
    assert converted.keys() == wanted.keys()
    for name, value in wanted.items():
        assert converted[name].dtype == value.dtype and torch.equal(converted[name], value), name
    assert not (target / STATE).exists() and not list(target.glob(f"*{PARTIAL}"))


def test_skipped_blocks_stay_float(tmp_path: Path):
    source = saved(tmp_path / "float")
    target = convert_checkpoint(source, tmp_path / "int8", skip="*layers.1*", progress=False)
    loaded = type(build("qwen3_moe")).from_pretrained(target)
    assert [record_of(module) is None for _, module in find_experts(loaded)] == [False, True]


def test_skip_names_outer_modules_and_says_what_it_missed(tmp_path: Path):
    source = saved(tmp_path / "float")
    with pytest.warns(UserWarning, match="skip: .*'nothing'"):
        target = convert_checkpoint(
            source, tmp_path / "int8", skip=["model.layers.1", "nothing"], progress=False
        )
    schemes = [layer.scheme for layer in explain_directory(target, "w8a8", "cpu")]
    plain = convert_checkpoint(source, tmp_path / "plain", skip="*layers.1*", progress=False)
    assert len(schemes) == 2
    for path in sorted(plain.glob("*.safetensors")):
        assert (target / path.name).read_bytes() == path.read_bytes()


def test_it_imports_no_transformers(tmp_path: Path):
    source = saved(tmp_path / "float")
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['triton'] = None\n"
        "from int8moe_compile.convert import convert_checkpoint\n"
        "convert_checkpoint(sys.argv[1], sys.argv[2], progress=False, verify=True)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "int8")]
    subprocess.run(command, cwd=ROOT, check=True)


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import int8moe_compile.convert as convert

    source = saved(tmp_path / "float")
    whole = contents(convert_checkpoint(source, tmp_path / "whole", progress=False))
    write, written = convert._write_shard, []

    def counting(conversion, path, *rest):
        if len(written) == 4:
            path.with_name(path.name + PARTIAL).write_bytes(b"half of it")
            raise KeyboardInterrupt
        written.append(path.name)
        write(conversion, path, *rest)

    monkeypatch.setattr(convert, "_write_shard", counting)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "int8", progress=False)
    assert not (tmp_path / "int8" / "config.json").exists()
    monkeypatch.setattr(
        convert, "_write_shard", lambda c, p, *r: (written.append(p.name), write(c, p, *r))
    )
    convert_checkpoint(source, tmp_path / "int8", progress=False)
    assert len(written) == len(set(written)) > 5
    assert contents(tmp_path / "int8") == whole


def converting(source: Path, target: Path) -> int:
    """Start a conversion in a process of its own, which flushes slowly; return its number."""
    child = os.fork()
    if child == 0:
        flush = os.fsync
        os.fsync = lambda file: (time.sleep(0.005), flush(file))[1]
        try:
            convert_checkpoint(source, target, progress=False)
        finally:
            os._exit(0)
    return child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_twenty_kills_and_resumptions_give_the_same_bytes(tmp_path: Path):
    source = saved(tmp_path / "float", shard="40KB")
    whole = contents(convert_checkpoint(source, tmp_path / "whole", progress=False))
    target, chance, kills = tmp_path / "int8", random.Random(0), 0
    for _ in range(400):
        if kills == 20:
            break
        child = converting(source, target)
        time.sleep(chance.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
        if (target / "config.json").exists():  # it came to its end: all of it is there
            assert {**contents(target), STATE: b""} == {**whole, STATE: b""}
            for path in target.iterdir():
                path.unlink()
    assert kills == 20
    convert_checkpoint(source, target, progress=False)
    assert contents(target) == whole


@pytest.mark.parametrize("change", ["scheme", "skip", "source"])
def test_only_the_same_conversion_continues(tmp_path: Path, change: str):
    source, target = saved(tmp_path / "float"), tmp_path / "int8"
    convert_checkpoint(source, target, progress=False)
    for path in target.iterdir():
        path.unlink()
    import int8moe_compile.convert as convert

    convert._begin(plan_conversion(source, W8A8), target, ())
    options = {"scheme": "w8a16"} if change == "scheme" else {}
    options |= {"skip": "*layers.1*"} if change == "skip" else {}
    if change == "source":
        file = next(source.glob("*.safetensors"))
        os.utime(file, (1, 1))
    with pytest.raises(ValueError, match="interrupted conversion of another"):
        convert_checkpoint(source, target, progress=False, **options)


def test_verification_names_what_differs(tmp_path: Path):
    source = saved(tmp_path / "float")
    target = convert_checkpoint(source, tmp_path / "int8", progress=False)
    file = sorted(target.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name}: .*was written wrong"):
        verify_conversion(plan_conversion(source, W8A8), target, progress=False)


def test_faults_of_the_user_are_said(tmp_path: Path):
    source = saved(tmp_path / "float")
    with pytest.raises(ValueError, match="needs calibration"):
        convert_checkpoint(source, tmp_path / "a", "w8a8_static", progress=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ValueError, match="wanted a new or empty folder"):
        convert_checkpoint(source, tmp_path / "full", progress=False)
    with pytest.raises(ValueError, match="another folder than SRC"):
        convert_checkpoint(source, source, progress=False)
    done = convert_checkpoint(source, tmp_path / "int8", progress=False)
    with pytest.raises(CheckpointError, match="wanted a float checkpoint"):
        convert_checkpoint(done, tmp_path / "b", progress=False)
    with pytest.raises(CheckpointError, match="wanted float weights of routed experts"):
        plan_conversion(without_experts(tmp_path / "dense"), W8A8)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-99.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-99\.safetensors, got none"):
        plan_conversion(source, W8A8)


@pytest.mark.parametrize(
    ("target", "word"),
    [("float/int8", "in"), ("float/a/b", "in"), (".", "around"), ("..", "around")],
)
def test_a_target_lies_beside_the_source(tmp_path: Path, target: str, word: str):
    source = saved(tmp_path / "float")
    before = contents(source)
    message = rf"DST: wanted a folder beside SRC, got .*, {word} .*float"
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / target, progress=False)
    assert contents(source) == before
    (tmp_path / "link").symlink_to(source, target_is_directory=True)
    with pytest.raises(ValueError, match="another folder than SRC"):
        convert_checkpoint(source, tmp_path / "link", progress=False)
    with pytest.raises(ValueError, match=r"beside SRC, got .*link/int8, in"):
        convert_checkpoint(source, tmp_path / "link" / "int8", progress=False)


@pytest.mark.parametrize("device", ["nope", "cuda:99", "meta", 1.5])
def test_a_device_that_cannot_compute_is_refused_first(tmp_path: Path, device: Any):
    source = saved(tmp_path / "float")
    with pytest.raises(ValueError, match=f"^device: wanted one to compute on, got '?{device}"):
        convert_checkpoint(source, tmp_path / "int8", device=device, progress=False)
    assert not (tmp_path / "int8").exists()


def test_skip_is_strings_or_none(tmp_path: Path):
    source = saved(tmp_path / "float")
    plain = contents(convert_checkpoint(source, tmp_path / "plain", progress=False))
    none = convert_checkpoint(source, tmp_path / "none", skip=None, progress=False)
    assert contents(none) == plain
    with pytest.raises(TypeError, match=r"^skip: wanted a string or a list of strings, got 5"):
        convert_checkpoint(source, tmp_path / "int8", skip=5, progress=False)
    assert not (tmp_path / "int8").exists()


@pytest.mark.parametrize("text", ["{", "", "[]", "\xff"])
def test_a_state_that_cannot_be_read_is_named(tmp_path: Path, text: str):
    source = saved(tmp_path / "float")
    (tmp_path / "int8").mkdir()
    (tmp_path / "int8" / STATE).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"{STATE}: "):
        convert_checkpoint(source, tmp_path / "int8", progress=False)


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, family: str):
    model = build(family)
    list(find_experts(model))[1][1].down_proj.data[3, 5, 7] = float("nan")
    model.save_pretrained(tmp_path / "float")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*layer 1, .*down\): .*finite"):
        convert_checkpoint(tmp_path / "float", tmp_path / "int8", progress=False)
    assert not (tmp_path / "int8" / "config.json").exists()


def test_files_that_transformers_does_not_load_are_left_out(tmp_path: Path):
    source = saved(tmp_path / "float", shard="1GB")
    (source / "consolidated.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    target = convert_checkpoint(source, tmp_path / "int8", progress=False)
    assert [file.name for file in target.glob("*.safetensors")] == ["model.safetensors"]
    assert len(list(explain_directory(source, device="cpu"))) == 2


def without_experts(directory: Path) -> Path:
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(4)}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_tensor", "w8a16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_explain_reads_headers_alone(tmp_path: Path, family: str, scheme: str):
    source = saved(tmp_path / "float", family)
    before = explain_directory(source, scheme, device="cpu")
    target = convert_checkpoint(source, tmp_path / "int8", scheme, progress=False)
    after = explain_directory(target, device="cpu")
    assert [layer.name for layer in before] == [layer.name for layer in after]
    assert len(after) == 2
    for was, now in zip(before, after, strict=True):
        assert (was.scheme, was.accepted) == (None, False) and "not quantised" in str(was.reason)
        assert (now.scheme, now.accepted, now.backend) == (scheme, True, "cpu")
        assert was.bytes_before == now.bytes_before == 3 * 8 * 48 * 64 * 2
        assert abs(was.bytes_after - now.bytes_after) < 0.1 * now.bytes_after
        assert now.bytes_after < 0.6 * now.bytes_before


def test_explain_says_why_not(tmp_path: Path):
    source = saved(tmp_path / "float")
    target = convert_checkpoint(source, tmp_path / "int8", progress=False)
    config = json.loads((target / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "group", "group_size": 32}
    (target / "config.json").write_text(json.dumps(config))
    for layer in explain_directory(target, device="cpu"):
        assert not layer.accepted and "group" in str(layer.reason)
