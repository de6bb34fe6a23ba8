"""Read the headers of safetensors files, and refuse files that are not whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .checkpoint_names import WEIGHT_ENDINGS, TensorName
from .errors import CheckpointError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# No real header comes near this; a corrupt length would otherwise be allocated.
_LONGEST_HEADER: Final = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """State where a tensor lies and what it is, as the header of its file says."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self.stop - self.start


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return every tensor of one file.

    Raises CheckpointError that names the file if it is truncated, has bytes left over, or its
    header is no header of safetensors.
    """
    fields, base, size = _read_fields(path)
    entries = {
        name: _entry(path, name, field, base)
        for name, field in fields.items()
        if name != "__metadata__"
    }
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise CheckpointError(
                f"{path}: corrupt: {name} wanted to begin at byte {end}, got {entry.start}"
            )
        end = entry.stop
    if end != size:
        raise CheckpointError(f"{path}: truncated or corrupt: wanted {end} bytes, got {size}")
    return entries


def read_metadata(paths: Iterable[Path]) -> dict[str, str]:
    """Return the free text that writers put into the headers, by its names."""
    found: dict[str, str] = {}
    for path in paths:
        metadata = _read_fields(path)[0].get("__metadata__")
        if isinstance(metadata, dict):
            found |= {str(name): str(text) for name, text in metadata.items()}
    return found


def _read_fields(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a file's header, the place where the tensors begin, and the file's size."""
    if not path.is_file():
        raise CheckpointError(f"{path}: wanted a safetensors file, got none")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise CheckpointError(
                f"{path}: truncated or corrupt: wanted a header of {length} bytes, got a file of "
                f"{size} bytes"
            )
        text = file.read(length)
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: corrupt: its header is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: corrupt: wanted a mapping as header, got {fields!r:.80}")
    return fields, 8 + length, size


def _entry(path: Path, name: str, field: Any, base: int) -> TensorEntry:
    """Check one tensor's entry of a header."""
    try:
        dtype = DTYPES[field["dtype"]]
        shape = tuple(int(size) for size in field["shape"])
        start, stop = (int(offset) for offset in field["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt: the header entry of {name}: {error!r}") from None
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or stop - start != wanted:
        raise CheckpointError(
            f"{path}: corrupt: {name} wanted {wanted} bytes for {list(shape)} of {dtype}, got "
            f"{stop - start}"
        )
    return TensorEntry(path, dtype, shape, base + start, base + stop)


def read_headers(paths: Iterable[Path]) -> dict[str, TensorEntry]:
    """Return the tensors of several files; raises CheckpointError if two files hold the same."""
    found: dict[str, TensorEntry] = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in found:
                raise CheckpointError(f"{path}: {name} is in {found[name].file.name}, too")
            found[name] = entry
    return found


def is_dense(name: TensorName, entries: Mapping[str, TensorEntry]) -> bool:
    """Say whether a name without experts in it is that of an ordinary linear layer."""
    if name.expert is not None:
        return False
    spelt = f"{name.block}.{name.spelling}"
    held = (entries.get(f"{spelt}{ending}") for ending in WEIGHT_ENDINGS)
    shapes = [entry.shape for entry in held if entry is not None]
    return bool(shapes) and all(len(shape) == 2 for shape in shapes)


def weight_files(directory: Path) -> list[Path]:
    """List the files that transformers loads: the single one, else those of the index, else all."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        paths = [directory / SINGLE]
    elif index.is_file():
        names = sorted(set(read_index(index).values()))
        paths = [directory / name for name in names]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{directory}: wanted safetensors files, got none")
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{index}: wanted file {path.name}, got none in {directory}")
    return paths


def read_index(path: Path) -> dict[str, str]:
    """Return the map from tensor to file name of an index file."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: weight_map: wanted a mapping, got {weight_map!r:.80}")
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path}: {key}: wanted the name of a file, got {name!r}")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; raises CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: wanted a mapping, got {value!r:.80}")
    return value


def read_tensor(entry: TensorEntry, index: int | None = None, out: Tensor | None = None) -> Tensor:
    """Return a tensor, or one slice of its first dimension, on the CPU in memory of its own.

    A mapped file would count as resident memory as long as the loader keeps it open. out: a
    contiguous tensor of the right dtype and shape to read into.
    """
    shape, start, size = entry.shape, entry.start, entry.size
    if index is not None:
        shape, size = shape[1:], size // shape[0]
        start += index * size
    tensor = torch.empty(shape, dtype=entry.dtype) if out is None else out
    assert tensor.is_contiguous() and tensor.shape == shape, "out does not fit the tensor"
    if size == 0:
        return tensor
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    data = memoryview(values)
    with entry.file.open("rb", buffering=0) as file:
        file.seek(start)
        done = 0
        while done < size:
            count = file.readinto(data[done:])
            if not count:
                raise CheckpointError(f"{entry.file}: truncated: wanted {size} bytes at {start}")
            done += count
    return tensor


class TensorReader:
    """Read single tensors, one open file at a time; use as a context."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        for opened in self._open.values():
            opened.__exit__(None, None, None)
        self._open.clear()

    def read(self, key: str) -> Tensor:
        """Return one tensor on the CPU."""
        from safetensors import SafetensorError, safe_open

        path = self._entries[key].file
        try:
            if path not in self._open:
                self.__exit__()
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(key)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {key}: cannot be read: {error}") from None
        return tensor


def nesting(one: Path, other: Path) -> str | None:
    """Say how a folder lies to another, through links: "at", "in" or "around" it, or None."""
    inner, outer = one.resolve(), other.resolve()
    if inner == outer or (one.exists() and other.exists() and one.samefile(other)):
        return "at"
    if outer in inner.parents:
        return "in"
    return "around" if inner in outer.parents else None
