"""What explain takes from headers alone: sizes, and modules that go by the name of their class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from hf_checkpoints import Written, build, compressed, load, write
from hf_formats import gptq, written_as_gptq, written_as_torchao
from safetensors.torch import load_file, save_file

from int8moe_compile import checkpoint_explain, explain
from int8moe_compile.checkpoint_explain import explain_directory
from int8moe_compile.convert import convert_checkpoint

HIDDEN, INTERMEDIATE = hf_models.HIDDEN, hf_models.INTERMEDIATE


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Collect experts, hidden and intermediate size of every problem that the oracle is asked."""
    seen: list[tuple[int, int, int]] = []
    kind = checkpoint_explain.MoeProblem

    def spied(**fields: Any) -> Any:
        names = ("num_experts", "hidden_size", "intermediate_size")
        seen.append(tuple(fields[name] for name in names))
        return kind(**fields)

    monkeypatch.setattr(checkpoint_explain, "MoeProblem", spied)
    return seen


def without_size(directory: Path) -> Path:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    del config["hidden_size"]
    file.write_text(json.dumps(config))
    return directory


def converted(family: str, scheme: str, folder: Path) -> Path:
    build(family).save_pretrained(folder / "float")
    return convert_checkpoint(folder / "float", folder / "int8", scheme, progress=False)


def of_floats(family: str, folder: Path) -> Path:
    build(family).save_pretrained(folder)
    return folder


KINDS = {
    "float": lambda folder: of_floats("qwen3_moe", folder),
    "float without gate": lambda folder: of_floats("nemotron_h", folder),
    "float, fused, transposed": lambda folder: of_floats("gpt_oss", folder),
    "float, fused": lambda folder: of_floats("granitemoe", folder),
    "int8": lambda folder: converted("mixtral", "w8a8", folder),
    "int8, fused, transposed": lambda folder: converted("gpt_oss", "w8a8_tensor", folder),
    "packed": lambda folder: converted("qwen3_moe", "w8a16", folder),
    "gptq": lambda folder: written_as_gptq(folder, gptq()).save(folder / "int8"),
    "torchao": lambda folder: written_as_torchao(folder, "gpt_oss", "w8a8").save(folder / "int8"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_come_from_the_weights_where_none_are_stated(
    tmp_path: Path, sizes: list[tuple[int, int, int]], kind: str
) -> None:
    directory = KINDS[kind](tmp_path)
    explain_directory(directory, device="cpu")
    explain_directory(without_size(directory), device="cpu")
    assert sizes == [(hf_models.EXPERTS, HIDDEN, INTERMEDIATE)] * 4


def test_experts_without_weights_are_named(tmp_path: Path) -> None:
    directory = converted("qwen3_moe", "w8a8", tmp_path)
    file = directory / "model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in load_file(file).items()
        if not (".layers.1.mlp.experts." in name and tensor.dtype == torch.int8)
    }
    save_file(tensors, file, {"format": "pt"})
    first, second = explain_directory(directory, device="cpu")
    assert first.accepted and not second.accepted
    assert "wanted the weights" in str(second.reason)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("target", ["Qwen3MoeExperts", "Linear"])
def test_the_class_may_be_a_target(good: Written, tmp_path: Path, target: str) -> None:
    written = replace(good, config=compressed(targets=(target,)))
    directory = written.save(tmp_path)
    wanted = [
        (layer.name, layer.scheme, layer.accepted) for layer in explain(load(directory, good))
    ]
    layers = explain_directory(directory, device="cpu")
    assert [(layer.name, layer.scheme, layer.accepted) for layer in layers] == wanted
    assert [layer.scheme for layer in layers] == ["w8a8"] * 2


def test_the_class_may_be_ignored(good: Written, tmp_path: Path) -> None:
    written = replace(good, config=compressed(ignore=("Qwen3MoeExperts",)))
    for layer in explain_directory(written.save(tmp_path), device="cpu"):
        assert "leaves it unquantised" in str(layer.reason)


def test_a_device_that_is_none_is_named(good: Written, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^device: wanted one of torch, got 'nope'"):
        explain_directory(good.save(tmp_path), device="nope")


def test_classes_of_experts_end_alike() -> None:
    assert all(kind.name.endswith("Experts") for kind in hf_models.experts_classes())
