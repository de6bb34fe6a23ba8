"""Say what a checkpoint directory holds, from config.json and the safetensors headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .checkpoint_config import CheckpointConfig, read_config, with_headers, without_zero_points
from .checkpoint_families import activation_of, family_refusal, text_config
from .checkpoint_files import TensorEntry, is_dense, read_headers, read_json, weight_files
from .checkpoint_names import TensorName, parse_name
from .checkpoint_schemes import CheckpointKeys
from .convert_plan import FUSED_LAYOUTS
from .errors import CheckpointError
from .explain import Explanation, Layer
from .oracle import DeviceFacts, MoeProblem, select_int8_moe_backend
from .schemes import INT8_STATIC_TENSOR, Scheme, parse_scheme
from .structure import Layout

_WEIGHTS = ("weight", "packed", "qweight")
_SIZES = ("num_experts_per_tok", "moe_k", "top_k")


def explain_directory(
    path: str | Path,
    scheme: str | Scheme = "w8a8",
    device: str | torch.device | DeviceFacts | None = None,
) -> Explanation:
    """Explain every block of routed experts of a checkpoint, without loading any weight.

    INT8 blocks by the scheme that they have; float ones as if they were quantised with ``scheme``.
    bytes_before: at the model's dtype. Raises CheckpointError for files that cannot be read,
    ValueError for a device that is none.
    """
    directory = Path(path)
    config = read_json(directory / "config.json")
    files = weight_files(directory)
    entries = read_headers(files)
    quantization = config.get("quantization_config")
    found = None
    if quantization is not None:
        found = with_headers(read_config(quantization), entries, files)
    blocks: dict[str, dict[str, tuple[TensorName, TensorEntry]]] = {}
    for key, entry in entries.items():
        name = parse_name(key)
        if name is not None and not is_dense(name, entries):
            blocks.setdefault(name.block, {})[key] = (name, entry)
    facts = _facts(device)
    return Explanation(
        _layer(block, tensors, config, found, parse_scheme(scheme), facts)
        for block, tensors in blocks.items()
    )


def _facts(device: str | torch.device | DeviceFacts | None) -> DeviceFacts:
    """Return the facts of a device; raises ValueError for a word that names none."""
    try:
        return device if isinstance(device, DeviceFacts) else DeviceFacts.of(device)
    except RuntimeError as error:
        raise ValueError(f"device: wanted one of torch, got {device!r}: {error}") from error


def _layer(
    block: str,
    tensors: Mapping[str, tuple[TensorName, TensorEntry]],
    config: Mapping[str, Any],
    quantization: CheckpointConfig | None,
    wanted: Scheme,
    facts: DeviceFacts,
) -> Layer:
    """Describe one block."""
    elements = _elements(tensors)
    refusal, config = family_refusal(config), text_config(config)
    dtype = _dtype(config)
    before = elements * dtype.itemsize
    quantised = any(name.part in ("scale", "packed", "scales") for name, _ in tensors.values())
    kind = str(config.get("model_type", "experts"))
    if quantised:
        after = sum(entry.size for name, entry in tensors.values() if name.part != "bias")
        keys = _keys(tensors, quantization)
        if isinstance(keys, str) or keys.scheme is None:
            why = keys if isinstance(keys, str) else str(keys.reason)
            return Layer(block, kind, None, False, None, why, before, after)
        scheme = keys.scheme
    else:
        scheme, after = wanted, _after(tensors, wanted, elements)
    backend, reason = None, refusal
    if refusal is None:
        backend, reason = _ask(tensors, config, scheme, facts, dtype)
    if not quantised and reason is None:
        reason = f"not quantised: would run as {scheme.name}"
        return Layer(block, kind, None, False, backend, reason, before, after)
    name = scheme.name if quantised else None
    return Layer(block, kind, name, backend is not None, backend, reason, before, after)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a model's own weights."""
    word = next((w for w in map(config.get, ("dtype", "torch_dtype")) if w is not None), "bfloat16")
    dtype = getattr(torch, word.removeprefix("torch."), None) if isinstance(word, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"config.json: dtype: wanted the name of a dtype, got {word!r:.80}")
    return dtype


def _elements(tensors: Mapping[str, tuple[TensorName, TensorEntry]]) -> int:
    """Count the elements of the weights, packed or not."""
    return sum(
        torch.Size(entry.shape).numel() * (4 if name.part in ("packed", "qweight") else 1)
        for name, entry in tensors.values()
        if name.part in _WEIGHTS
    )


def _after(
    tensors: Mapping[str, tuple[TensorName, TensorEntry]], scheme: Scheme, elements: int
) -> int:
    """Return the bytes of codes and scales after a quantisation."""
    weights = [(name, entry) for name, entry in tensors.values() if name.part == "weight"]
    if scheme.weight_key == INT8_STATIC_TENSOR:
        return elements + 4 * len(weights)
    # Whichever of the two last sizes is not the shared one, both are close enough for a fused
    # tensor; a single expert's rows are exact.
    rows = sum(torch.Size(entry.shape[:-1]).numel() for _, entry in weights)
    return elements + 4 * rows


def _keys(
    tensors: Mapping[str, tuple[TensorName, TensorEntry]], quantization: CheckpointConfig | None
) -> CheckpointKeys | str:
    """Return the keys that all projections share, or why there are none."""
    if quantization is None:
        return "scales without a quantization_config in config.json"
    kind = _class_name(quantization)
    found = {
        quantization.keys_of([name.module, f"{name.block}.0.{name.spelling}"], kind)
        for name, _ in tensors.values()
    }
    if len(found) > 1:
        return "only some of its projections are quantised, or in different ways"
    (keys,) = found
    if keys is None:
        return "quantization_config leaves it unquantised, but it has scales"
    zeros = any(name.part in ("zero_point", "qzeros") for name, _ in tensors.values())
    return keys if keys.reason is None or not zeros else without_zero_points(keys)


def _class_name(quantization: CheckpointConfig) -> str:
    """Return the class of the experts if the configuration names it; all of them end alike."""
    entries = [target for group in quantization.groups for target in group.targets]
    words = [word for word in (*entries, *quantization.ignore) if word.isidentifier()]
    return next((word for word in words if word.endswith("Experts")), "Linear")


def _hidden_size(
    weights: Sequence[tuple[TensorName, TensorEntry]], config: Mapping[str, Any]
) -> int:
    """Return the hidden size that the configuration states, else the one that the weights have."""
    stated = config.get("hidden_size")
    if isinstance(stated, int):
        return stated
    layout = FUSED_LAYOUTS.get(str(config.get("model_type")), Layout())
    for name, entry in weights:
        rows, columns = entry.shape[-2:] if len(entry.shape) > 1 else (0, 0)
        rows, columns = (rows, 4 * columns) if name.part == "packed" else (rows, columns)
        if name.part == "qweight":
            rows, columns = columns, 4 * rows
        elif name.expert is None and layout.transposed:
            rows, columns = columns, rows
        # The rows of the second product are never packed, and so exact.
        if name.projection == "down":
            return rows
        stated = columns
    return stated if isinstance(stated, int) else 0


def _ask(
    tensors: Mapping[str, tuple[TensorName, TensorEntry]],
    config: Mapping[str, Any],
    scheme: Scheme,
    facts: DeviceFacts,
    dtype: torch.dtype,
) -> tuple[str | None, str | None]:
    """Return the backend that the oracle picks, or its reason."""
    experts = {name.expert for name, _ in tensors.values()}
    weights = [(name, e) for name, e in tensors.values() if name.part in _WEIGHTS]
    if not all(entry.shape for _, entry in weights) or not weights:
        return None, "wanted the weights of its experts, got none"
    count = weights[0][1].shape[0] if experts == {None} else len(experts)
    hidden = _hidden_size(weights, config)
    gated = any(name.projection in ("gate", "gate_up") for name, _ in tensors.values())
    top_k = next((config[name] for name in _SIZES if isinstance(config.get(name), int)), 1)
    total = _elements(tensors)
    intermediate = total // (count * hidden * (3 if gated else 2)) if count * hidden else 0
    problem = MoeProblem(
        num_experts=count,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        dtype=dtype,
        gated=gated,
        activation=activation_of(config),
        has_bias=any(name.part == "bias" for name, _ in tensors.values()),
    )
    try:
        choice = select_int8_moe_backend(
            problem, scheme.weight_key, scheme.activation_key, device=facts
        )
    except (NotImplementedError, ValueError) as error:
        return None, str(error)
    return choice.backend, None
