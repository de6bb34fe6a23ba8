"""Strictness: a checkpoint with one fault in it is refused by name, and no model comes back."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import (
    CHANNEL,
    STATIC_TENSOR,
    TENSOR,
    TOKEN,
    Tensors,
    Written,
    check,
    compressed,
    load,
    write,
)

from int8moe_compile.errors import CheckpointError

BLOCK = "model.layers.1.mlp.experts"
GATE = f"{BLOCK}.3.gate_proj"
WHERE = r"\(layer 1, expert 3, gate\)"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write one checkpoint with static scales; every fault is put into a copy of it."""
    return write(
        tmp_path_factory.mktemp("good"),
        config=compressed(inputs=STATIC_TENSOR),
        input_scale=lambda _: torch.tensor([0.04]),
    )


def put(name: str, value: Any) -> Callable[[Tensors], None]:
    """Return a fault that exchanges or adds a tensor; value: a tensor or a function of the old."""

    def fault(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]) if callable(value) else value

    return fault


def drop(name: str) -> Callable[[Tensors], None]:
    """Return a fault that takes a tensor away."""

    def fault(tensors: Tensors) -> None:
        del tensors[name]

    return fault


def rename(name: str, new: str) -> Callable[[Tensors], None]:
    """Return a fault that gives a tensor another name."""

    def fault(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(name)

    return fault


def first_set(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that sets the first element of a copy."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


W, S, X = f"{GATE}.weight", f"{GATE}.weight_scale", f"{GATE}.input_scale"
FUSED = f"{BLOCK}.gate_up_proj"
NORM = "model.norm.weight"
# name -> the fault, and what the message has to say
FAULTS: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "a missing weight": (drop(W), r"layer 1, expert 3, gate\): wanted its weight, got none"),
    "a missing scale": (drop(S), r"layer 1, expert 3, gate\): wanted its scale, got none"),
    "a missing input scale": (drop(X), r"layer 1, expert 3, gate\): wanted its input_scale"),
    "a missing down scale": (
        drop(f"{BLOCK}.7.down_proj.weight_scale"),
        r"layer 1, expert 7, down\): wanted its scale",
    ),
    "a renamed weight": (rename(W, f"{GATE}.wieght"), "expert 3, gate.*wanted its weight"),
    "an expert too many": (rename(W, f"{BLOCK}.8.gate_proj.weight"), "expert 3, gate"),
    "an extra expert": (
        put(f"{BLOCK}.8.gate_proj.weight", torch.zeros(48, 64, dtype=torch.int8)),
        r"experts\.8\.gate_proj\.weight .*extra",
    ),
    "a stray packed weight": (
        put(f"{W}_packed", torch.zeros(48, 16, dtype=torch.int32)),
        f"{GATE}.weight_packed {WHERE}",
    ),
    "a stray fused weight": (
        put(FUSED, torch.zeros(8, 96, 64, dtype=torch.int8)),
        "layer 1.*gate_up",
    ),
    "a stray fused packed weight": (
        put(f"{FUSED}_packed", torch.zeros(8, 96, 16, dtype=torch.int32)),
        "layer 1.*gate_up",
    ),
    "an unknown ending": (
        put(f"{GATE}.weight_norm", torch.ones(1)),
        f"{GATE}.weight_norm {WHERE}.*no ending 'weight_norm'",
    ),
    "a bias of its own": (put(f"{GATE}.bias", torch.zeros(48)), f"{GATE}.bias {WHERE}"),
    "a group index": (
        put(f"{GATE}.weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        f"{GATE}.weight_g_idx {WHERE}",
    ),
    "two names for one tensor": (
        put(f"{BLOCK}.3.w1.weight", torch.zeros(48, 64, dtype=torch.int8)),
        r"the same tensor is there as .*experts\.3\.",
    ),
    "a tensor beside the experts": (
        put(f"{BLOCK}.something", torch.zeros(3)),
        f"{BLOCK}.something.*extra",
    ),
    "a weight of another shape": (
        put(W, torch.zeros(48, 63, dtype=torch.int8)),
        rf"{W} {WHERE}: wanted shape \[48, 64\], got \[48, 63\]",
    ),
    "a transposed weight": (put(W, lambda t: t.t()), r"wanted shape \[48, 64\], got \[64, 48\]"),
    "a scale of another shape": (
        put(S, lambda t: t[:47]),
        rf"{S} {WHERE}: wanted shape \[48\] or \[48, 1\], got \[47, 1\]",
    ),
    "a scale the wrong way round": (put(S, lambda t: t.t()), r"wanted shape.*got \[1, 48\]"),
    "one scale for a channel-wise weight": (
        put(S, torch.ones(1)),
        rf"{WHERE}: wanted shape \[48\] or \[48, 1\], got \[1\]",
    ),
    "an input scale per row": (put(X, torch.ones(48)), rf"{X} {WHERE}: wanted shape.*got \[48\]"),
    "a float weight": (
        put(W, lambda t: t.to(torch.bfloat16)),
        rf"{W} {WHERE}: wanted torch.int8, got torch.bfloat16",
    ),
    "an unsigned weight": (
        put(W, lambda t: t.to(torch.uint8)),
        "wanted torch.int8, got torch.uint8",
    ),
    "an integer scale": (put(S, lambda t: t.to(torch.int32)), rf"{S} {WHERE}.*got torch.int32"),
    "a scale of zero": (put(S, first_set(0.0)), rf"{S} {WHERE}: wanted positive.*got 0.0"),
    "a negative scale": (put(S, first_set(-1.0)), rf"{S} {WHERE}: wanted positive.*got -1.0"),
    "a scale that is NaN": (put(S, first_set(float("nan"))), rf"{S} {WHERE}.*got nan"),
    "an infinite scale": (put(S, first_set(float("inf"))), rf"{S} {WHERE}.*got inf"),
    "an input scale of zero": (put(X, torch.zeros(1)), rf"{X} {WHERE}: wanted positive"),
    "a zero point": (
        put(f"{GATE}.weight_zero_point", torch.ones(48, 1, dtype=torch.int8)),
        f"{GATE}.weight_zero_point {WHERE}.*asymmetric",
    ),
    "a missing norm": (drop(NORM), f"wanted tensor {NORM}, got none"),
    "a norm of another shape": (
        put(NORM, torch.ones(63, dtype=torch.bfloat16)),
        rf"{NORM}: wanted torch.bfloat16 \[64\], got torch.bfloat16 \[63\]",
    ),
    "codes where no scale is": (
        put("model.layers.0.self_attn.q_proj.weight", lambda t: t.to(torch.int8)),
        "self_attn.q_proj.weight: wanted torch.bfloat16",
    ),
}


def test_the_checkpoint_without_faults_loads(good: Written, tmp_path: Path):
    check(load(good.save(tmp_path), good), good)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_tensor_is_refused(good: Written, tmp_path: Path, name: str):
    fault, message = FAULTS[name]
    tensors = dict(good.tensors)
    fault(tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(replace(good, tensors=tensors).save(tmp_path), good)
    assert str(tmp_path) in str(caught.value)


@dataclass(frozen=True)
class Contradiction:
    """Hold a configuration that does not fit the tensors, and what has to be said."""

    config: dict[str, Any]
    message: str


CONFIGS = {
    "per tensor": Contradiction(compressed(TENSOR, STATIC_TENSOR), r"got \[48, 1\]"),
    "dynamic": Contradiction(compressed(CHANNEL, TOKEN), "input_scale .*extra"),
    "weight-only": Contradiction(compressed(CHANNEL, None), "input_scale .*extra"),
    "asymmetric inputs": Contradiction(
        compressed(CHANNEL, {**TOKEN, "symmetric": False}), "mlp.experts: .*activation.*asymmetric"
    ),
    "all ignored": Contradiction(
        compressed(CHANNEL, STATIC_TENSOR, ignore=("re:.*",)), "leaves .*mlp.experts unquantised"
    ),
    "channel-wise inputs": Contradiction(
        compressed(CHANNEL, {**CHANNEL, "dynamic": True}), "mlp.experts: quantization_config"
    ),
    "unreadable": Contradiction(
        compressed({**CHANNEL, "num_bits": "eight"}, STATIC_TENSOR), "num_bits.*'eight'"
    ),
    "a broken pattern": Contradiction(
        compressed(CHANNEL, STATIC_TENSOR, ignore=("re:(",)), "regular expression"
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_contradicts_the_tensors_is_refused(
    good: Written, tmp_path: Path, name: str
):
    with pytest.raises(CheckpointError, match=CONFIGS[name].message):
        load(replace(good, config=CONFIGS[name].config).save(tmp_path), good)


def shortened(data: bytes) -> bytes:
    return data[:-100]


def lengthened(data: bytes) -> bytes:
    return data + b"\0" * 100


def only_a_stump(data: bytes) -> bytes:
    return data[:5]


def huge_header(data: bytes) -> bytes:
    return struct.pack("<Q", 2**62) + data[8:]


def no_json(data: bytes) -> bytes:
    return data[:8] + b"\xff" + data[9:]


def another_dtype(data: bytes) -> bytes:
    return data.replace(b'"I8"', b'"I3"', 1)


def wrong_offsets(data: bytes) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header[W]["data_offsets"][0] += 1
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        shortened,
        lengthened,
        only_a_stump,
        huge_header,
        no_json,
        another_dtype,
        wrong_offsets,
    ],
)
def test_a_damaged_file_is_refused(good: Written, tmp_path: Path, damage: Callable[[bytes], bytes]):
    directory = good.save(tmp_path)
    file = directory / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*(corrupt|truncated)"):
        load(directory, good)


def test_a_missing_file_is_refused(good: Written, tmp_path: Path):
    directory = good.save(tmp_path)
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    files = dict.fromkeys(good.tensors, "model-1.safetensors") | {NORM: "model-2.safetensors"}
    text = json.dumps({"metadata": {}, "weight_map": files})
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: wanted .* file, got none"):
        load(directory, good)


def test_pickled_weights_are_refused(good: Written, tmp_path: Path):
    directory = good.save(tmp_path)
    (directory / "model.safetensors").unlink()
    torch.save(good.tensors, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="wanted a checkpoint of safetensors files"):
        load(directory, good)
