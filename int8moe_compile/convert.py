"""Convert a float checkpoint to INT8 experts, file by file, without loading the model.

One expert is in memory at a time. A file is written under another name, flushed to the disk and
renamed when it is whole; config.json comes last, so that a conversion that was interrupted is
neither taken for a checkpoint nor started from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .checkpoint_fields import patterns
from .checkpoint_files import DTYPES, INDEX, nesting, read_header, read_json, read_tensor
from .checkpoint_names import place
from .checkpoint_pack import pack_codes
from .convert_plan import Conversion, Step, plan_conversion
from .device import unusable
from .errors import CheckpointError
from .ops.quantize import quantize_weight
from .passes.layouts import Which, from_hf_layout, interleave, to_hf_layout
from .schemes import INT8_STATIC_TENSOR, Scheme, parse_scheme

STATE: Final = "int8moe-conversion.json"
PARTIAL: Final = ".partial"
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
# Bytes that are copied at a time.
_PIECE: Final = 16 * 2**20


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    scheme: str | Scheme = "w8a8",
    *,
    skip: str | Sequence[str] | None = (),
    device: str | torch.device = "cpu",
    verify: bool = False,
    progress: bool = True,
) -> Path:
    """Write a checkpoint directory with INT8 experts; return it.

    skip: fnmatch patterns of the names of experts blocks in the checkpoint. device: where to
    quantise. verify: read everything back and compare. An interrupted conversion of the same
    source and scheme continues. Raises ValueError for "w8a8_static", which needs calibration, for
    a device that cannot be used, and for a target that lies in the source or around it or has
    something else in it; CheckpointError for a source that cannot be converted.
    """
    source, target, wanted = Path(source), Path(target), parse_scheme(scheme)
    if wanted.activation_quant == "static":
        raise ValueError(
            f'scheme: "{wanted.name}" needs calibration; load the model, then '
            "int8moe_compile.quantize_(model, ..., calibration=...) and save_pretrained"
        )
    left_out, reason = patterns("skip", skip), unusable(device)
    if reason is not None:
        raise ValueError(f"device: wanted one to compute on, got {device!r}: {reason}")
    _refuse_nested(source, target)
    conversion = plan_conversion(source, wanted, left_out)
    _begin(conversion, target, left_out)
    with _bar(conversion, progress, "converting") as bar:
        for file, steps in conversion.shards.items():
            if not _is_done(target / file, steps):
                _write_shard(conversion, target / file, steps, torch.device(device), bar)
            else:
                bar.update(sum(step.entry.size for step in steps))
    _finish(conversion, target)
    if verify:
        verify_conversion(conversion, target, progress=progress)
    return target


def _refuse_nested(source: Path, target: Path) -> None:
    """Refuse a target in the source, which would grow by it, or one that holds the source."""
    word = nesting(target, source)
    if word == "at":
        raise ValueError(f"DST: wanted another folder than SRC, got {target}")
    if word is not None:
        raise ValueError(f"DST: wanted a folder beside SRC, got {target}, {word} {source}")


def _begin(conversion: Conversion, target: Path, skip: Sequence[str]) -> None:
    """Create the target, or make sure that it is the same conversion that was interrupted."""
    if target.exists() and not target.is_dir():
        raise ValueError(f"DST: wanted a folder, got a file: {target}")
    target.mkdir(parents=True, exist_ok=True)
    state = {"fingerprint": _fingerprint(conversion, skip), "source": str(conversion.source)}
    file = target / STATE
    if file.is_file():
        if read_json(file) != state:
            raise ValueError(
                f"DST: {target} holds an interrupted conversion of another source, scheme or "
                "skip; wanted the same, or a new or empty folder"
            )
        return
    if any(path.name != STATE + PARTIAL for path in target.iterdir()):
        raise ValueError(f"DST: wanted a new or empty folder, got {target}")
    _write_text(file, json.dumps(state))


def _fingerprint(conversion: Conversion, skip: Sequence[str]) -> str:
    """Return a hash of all that decides the bytes of the target, the source by size and time."""
    parts: list[Any] = [repr(conversion.scheme), list(skip), sorted(conversion.weight_map.items())]
    for file in conversion.shards:
        status = (conversion.source / file).stat()
        parts.append([file, status.st_size, status.st_mtime_ns])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _is_done(path: Path, steps: Sequence[Step]) -> bool:
    """Say whether a file is there; it has its name only when it is whole."""
    if not path.is_file():
        return False
    found = {name: (entry.dtype, entry.shape) for name, entry in read_header(path).items()}
    return found == {o.name: (o.dtype, o.shape) for step in steps for o in step.outputs}


def _write_shard(
    conversion: Conversion, path: Path, steps: Sequence[Step], device: torch.device, bar: Any
) -> None:
    """Write one file, tensor by tensor, each at the place that the header gives it."""
    header, offsets, size = _layout(steps)
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
        for step in steps:
            starts = [len(header) + offsets[output.name] for output in step.outputs]
            if step.name is None:
                _copy(step, file, starts[0])
            else:
                for pieces in quantised(conversion, step, device):
                    for start, (offset, tensor) in zip(starts, pieces, strict=True):
                        file.seek(start + offset)
                        file.write(_bytes(tensor))
            bar.update(step.entry.size)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)


def _layout(steps: Sequence[Step]) -> tuple[bytes, dict[str, int], int]:
    """Return a header, the offset of every tensor behind it, and their bytes together."""
    outputs = [output for step in steps for output in step.outputs]
    outputs.sort(key=lambda output: -output.dtype.itemsize)  # aligned, widest first
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for output in outputs:
        offsets[output.name] = end
        size = torch.Size(output.shape).numel() * output.dtype.itemsize
        fields[output.name] = {
            "dtype": _NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets, end


# The pieces of each output that follow one another: offset in bytes, values.
Pieces = list[tuple[int, Tensor]]


def quantised(conversion: Conversion, step: Step, device: torch.device) -> Iterator[Pieces]:
    """Quantise one tensor expert by expert; yield the next piece of every output."""
    name, entry = step.name, step.entry
    assert name is not None, "only weights of experts are quantised"
    per_tensor = conversion.scheme.weight_key == INT8_STATIC_TENSOR
    if name.expert is not None:
        weight = read_tensor(entry).to(device)
        codes, scale = _codes_and_scale(step, weight, "tensor" if per_tensor else "channel")
        codes, scale = codes.cpu(), scale.cpu()
        if conversion.scheme.activation_key is None:
            shape = torch.tensor(codes.shape)
            yield [(0, pack_codes(codes)), (0, scale), (0, shape)]
        else:
            yield [(0, codes), (0, scale)]
        return
    which: Which = "w2" if name.projection == "down" else "w13"
    granularity = "channel"
    if per_tensor:
        granularity = "halves" if name.projection == "gate_up" else "tensor"
    layout = conversion.layout
    for index in range(entry.shape[0]):
        ours = from_hf_layout(read_tensor(entry, index)[None].to(device), layout, which)
        codes, scale = _codes_and_scale(step, ours, granularity)
        if layout.interleaved and which == "w13" and not per_tensor:
            scale = interleave(scale)
        codes = to_hf_layout(codes, layout, which).contiguous().cpu()
        yield [(index * codes.numel(), codes), (index * scale.numel() * 4, scale.cpu())]


def _codes_and_scale(step: Step, weight: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """Quantise; a refusal names file and tensor."""
    try:
        return quantize_weight(weight, granularity)
    except ValueError as error:
        raise CheckpointError(f"{step.entry.file}: {place(step.key)}: {error}") from error


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU."""
    values: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def _copy(step: Step, file: Any, start: int) -> None:
    """Copy the bytes of a tensor piece by piece."""
    file.seek(start)
    with step.entry.file.open("rb") as source:
        source.seek(step.entry.start)
        left = step.entry.size
        while left:
            data = source.read(min(left, _PIECE))
            if not data:
                raise CheckpointError(f"{step.entry.file}: {step.key}: the file ended too early")
            file.write(data)
            left -= len(data)


def _finish(conversion: Conversion, target: Path) -> None:
    """Copy what is no weight, write the index, and the configuration last of all."""
    for path in sorted(conversion.source.iterdir()):
        special = path.name in ("config.json", INDEX) or path.suffix in _WEIGHTS
        if path.is_file() and not special and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    if conversion.is_sharded:
        size = sum((target / file).stat().st_size for file in conversion.shards)
        index = {"metadata": {"total_size": size}, "weight_map": conversion.weight_map}
        _write_text(target / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    text = json.dumps(conversion.config, indent=2, sort_keys=True) + "\n"
    _write_text(target / "config.json", text)
    (target / STATE).unlink()
    _sync_folder(target)


def _write_text(path: Path, text: str) -> None:
    """Write a small file so that it is whole or not there."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _sync_folder(path: Path) -> None:
    """Make renames in a folder last, where the system has a way to."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _bar(conversion: Conversion, progress: bool, what: str) -> Any:
    """Return a progress bar over the bytes of the source."""
    from tqdm.auto import tqdm

    total = sum(step.entry.size for steps in conversion.shards.values() for step in steps)
    return tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not progress)


def verify_conversion(conversion: Conversion, target: Path, *, progress: bool = True) -> None:
    """Quantise everything again and compare it with what is in the files.

    Raises CheckpointError that names the first tensor that differs.
    """
    with _bar(conversion, progress, "verifying") as bar:
        for file, steps in conversion.shards.items():
            written = read_header(target / file)
            for step in steps:
                entries = [written[output.name] for output in step.outputs]
                with (target / file).open("rb") as opened:
                    for offset, entry, data in _expected(conversion, step, entries):
                        opened.seek(entry.start + offset)
                        if opened.read(len(data)) != data:
                            raise CheckpointError(f"{target / file}: {step.key}: was written wrong")
                bar.update(step.entry.size)


def _expected(
    conversion: Conversion, step: Step, entries: Sequence[Any]
) -> Iterator[tuple[int, Any, bytes | memoryview]]:
    """Yield offset, entry and bytes of all that a step has to have written."""
    if step.name is not None:
        for pieces in quantised(conversion, step, torch.device("cpu")):
            for entry, (offset, tensor) in zip(entries, pieces, strict=True):
                yield offset, entry, _bytes(tensor)
        return
    with step.entry.file.open("rb") as source:
        source.seek(step.entry.start)
        for offset in range(0, step.entry.size, _PIECE):
            count = min(_PIECE, step.entry.size - offset)
            yield offset, entries[0], source.read(count)
