"""Read the headers of safetensors files that are valid, whatever they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from int8moe_compile.checkpoint_files import read_header, read_tensor


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool])
def test_dtypes_beside_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1], dtype=dtype)
    save_file({"weight": torch.ones(2, 3), "mask": values}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    assert entries["mask"].dtype == dtype
    assert torch.equal(read_tensor(entries["mask"]), values)


@pytest.mark.parametrize("name", ["a", "m", "z"])
def test_tensors_without_elements(tmp_path: Path, name: str) -> None:
    """They begin where another tensor does, whose entry may come first in the header."""
    tensors = {"b": torch.ones(2), name: torch.empty(0, 3), "n": torch.ones(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    assert {key: read_tensor(entry).shape for key, entry in entries.items()} == {
        key: tensor.shape for key, tensor in tensors.items()
    }
