"""Oracle: tables of made-up devices, problems and keys against the backend or the reason."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from typing import Any

import fake_humming
import pytest
import torch

from int8moe_compile import device as device_module
from int8moe_compile import oracle
from int8moe_compile.oracle import (
    Choice,
    CpuBackend,
    DeviceFacts,
    HummingBackend,
    MoeProblem,
    TritonBackend,
    select_int8_moe_backend,
)
from int8moe_compile.schemes import (
    INT8_DYNAMIC_TENSOR,
    INT8_DYNAMIC_TOKEN,
    INT8_STATIC_CHANNEL,
    INT8_STATIC_TENSOR,
    QuantKey,
)

PROBLEM = MoeProblem(num_experts=8, top_k=2, hidden_size=64, intermediate_size=48)
W8A8 = (INT8_STATIC_CHANNEL, INT8_DYNAMIC_TOKEN)
CPU = DeviceFacts("cpu")
H200 = DeviceFacts("cuda", (9, 0), "sm_90", 232_448, 132)
MI300 = DeviceFacts("cuda", (9, 4), "gfx942:sramecc+:xnack-", 65_536, 304)
NO_HUMMING = HummingBackend(importable=lambda name: False)
HUMMING = HummingBackend(importable=lambda name: name == "humming")


def choose(device: Any = CPU, backend: Any = "auto", keys: Any = W8A8, problem: Any = PROBLEM):
    return select_int8_moe_backend(problem, *keys, backend=backend, device=device)


def refusal(device: Any, keys: Any = W8A8, problem: Any = PROBLEM, backend: str = "triton") -> str:
    with pytest.raises(ValueError) as caught:
        choose(device, backend, keys, problem)
    return str(caught.value)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("weight_key", [INT8_STATIC_CHANNEL, INT8_STATIC_TENSOR])
@pytest.mark.parametrize(
    "activation_key", [INT8_DYNAMIC_TOKEN, INT8_DYNAMIC_TENSOR, INT8_STATIC_TENSOR, None]
)
def test_triton_serves_every_scheme_from_sm_75(capability, weight_key, activation_key):
    choice = choose(DeviceFacts("cuda", capability), keys=(weight_key, activation_key))
    assert choice == Choice("triton", weight_key, activation_key, {})


@pytest.mark.parametrize("arch", ["gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"])
def test_triton_serves_cdna(arch):
    assert choose(DeviceFacts("cuda", arch=arch)).backend == "triton"
    assert choose(DeviceFacts("cuda", (9, 0), f"{arch}:sramecc+:xnack-")).backend == "triton"
    assert choose(DeviceFacts("hip", arch=arch)).backend == "triton"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (DeviceFacts("cuda", (7, 0)), ["sm_75", "sm_70"]),
        (DeviceFacts("cuda", (6, 1), "sm_61"), ["sm_75", "sm_61"]),
        (DeviceFacts("cuda", (7, 5), int8_dot=False), ["int8 dot", "sm_75"]),
        (DeviceFacts("cuda", (9, 0), int8_dot=False), ["int8 dot", "sm_90"]),
        (DeviceFacts("cuda"), ["capability"]),
        (DeviceFacts("cuda", (11, 0), "gfx1100"), ["CDNA", "gfx1100"]),
        (DeviceFacts("cuda", (9, 4), "gfx9420"), ["CDNA", "gfx9420"]),
        (dataclasses.replace(MI300, int8_dot=False), ["int8 dot", "gfx942"]),
        (DeviceFacts("mps"), ["mps"]),
        (CPU, ["cpu"]),
    ],
)
def test_triton_refuses_a_device_with_a_reason(device, words):
    message = refusal(device)
    assert all(word in message for word in ["triton", *words]), message


def test_an_unknown_newer_gpu_is_served_without_alarm(caplog):
    with caplog.at_level(logging.DEBUG):
        assert choose(DeviceFacts("cuda", (99, 1), "sm_991", 1, 1)).backend == "triton"
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_an_unfit_gpu_is_not_run_on_the_cpu():
    turing = DeviceFacts("cuda", (7, 5), int8_dot=False)
    with pytest.raises(NotImplementedError, match="no INT8 MoE backend"):
        choose(turing)


def test_the_next_backend_is_asked_and_the_reasons_are_kept(monkeypatch, caplog):
    monkeypatch.setattr(oracle, "BACKENDS", (TritonBackend(), NO_HUMMING, CpuBackend()))
    with caplog.at_level(logging.DEBUG, "int8moe_compile"):
        choice = choose(CPU)
    assert choice.backend == "cpu"
    assert list(choice.reasons) == ["triton", "humming"]
    for backend, reason in choice.reasons.items():
        assert any(backend in line and reason in line for line in caplog.messages)


def test_humming_stands_in_for_triton_where_its_own_needs_are_met(monkeypatch):
    monkeypatch.setattr(oracle, "BACKENDS", (TritonBackend(), HUMMING, CpuBackend()))
    no_dot = dataclasses.replace(H200, int8_dot=False)
    choice = choose(no_dot)
    assert (choice.backend, list(choice.reasons)) == ("humming", ["triton"])
    assert choose(H200).backend == "triton"
    assert choose(H200, "humming").backend == "humming"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": DeviceFacts("cuda", (7, 5))}, "sm_75"),
        ({"device": DeviceFacts("cuda")}, "capability"),
        ({"device": CPU}, "cpu"),
        ({"device": MI300}, "gfx942"),
        ({"keys": (INT8_STATIC_TENSOR, INT8_DYNAMIC_TOKEN)}, "per channel"),
        ({"keys": (INT8_STATIC_CHANNEL, None)}, "per token"),
        ({"problem": dataclasses.replace(PROBLEM, dtype=torch.float32)}, "float32"),
        ({"problem": dataclasses.replace(PROBLEM, has_bias=True)}, "bias"),
        ({"problem": dataclasses.replace(PROBLEM, gated=False)}, "gated"),
        ({"problem": dataclasses.replace(PROBLEM, activation="gelu")}, "silu"),
        (
            {"problem": dataclasses.replace(PROBLEM, hidden_size=72)},
            "16, got (72, 48)",
        ),
        ({"problem": dataclasses.replace(PROBLEM, intermediate_size=40)}, "got (64, 40)"),
    ],
)
def test_humming_refuses_with_a_reason(monkeypatch, change, word):
    monkeypatch.setattr(oracle, "BACKENDS", (TritonBackend(), HUMMING, CpuBackend()))
    assert word in refusal(**{"device": H200, "backend": "humming", **change})


def test_humming_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(oracle, "BACKENDS", (NO_HUMMING,))
    message = refusal(H200, backend="humming")
    assert 'humming-kernels is not installed: pip install "int8moe_compile[humming]"' in message


def test_humming_is_accepted_when_importable_and_asked_for():
    if importlib.util.find_spec("humming") is None:
        assert "pip install" in refusal(H200, backend="humming")
    with fake_humming.installed():
        assert choose(H200, "humming").backend == "humming"
        assert choose(H200).backend == "triton"


ILLEGAL_KEYS = [
    ((QuantKey("group", group_size=128), INT8_DYNAMIC_TOKEN), "128"),
    ((QuantKey("group"), INT8_DYNAMIC_TOKEN), "no group size"),
    ((QuantKey("channel", group_size=128), None), "128"),
    ((QuantKey("channel", symmetric=False), INT8_DYNAMIC_TOKEN), "asymmetric"),
    ((INT8_STATIC_CHANNEL, QuantKey("token", dynamic=True, symmetric=False)), "asymmetric"),
    ((QuantKey("channel", bits=4), None), "4"),
    ((QuantKey("channel", bits="8"), None), "'8'"),  # type: ignore[arg-type]
    ((QuantKey("channel", bits=True), None), "True"),
    ((QuantKey("channel", bits=None), None), "None"),  # type: ignore[arg-type]
    ((QuantKey("block"), None), "block"),
    ((QuantKey(None), None), "None"),  # type: ignore[arg-type]
    ((QuantKey(["channel"]), None), "channel"),  # type: ignore[arg-type]
    ((QuantKey("channel", dynamic=True), INT8_DYNAMIC_TOKEN), "static"),
    ((QuantKey("channel", dynamic="no"), None), "boolean"),  # type: ignore[arg-type]
    ((QuantKey("token"), INT8_DYNAMIC_TOKEN), "token"),
    ((INT8_STATIC_CHANNEL, INT8_STATIC_CHANNEL), "per token"),
    ((INT8_STATIC_CHANNEL, QuantKey("token")), "dynamic per token"),
    ((INT8_STATIC_CHANNEL, QuantKey("group", True, group_size=32)), "32"),
    ((None, INT8_DYNAMIC_TOKEN), "not quantised"),
    ((None, None), "not quantised"),
    (("w8a8", INT8_DYNAMIC_TOKEN), "w8a8"),
    ((INT8_STATIC_CHANNEL, {"num_bits": 8}), "num_bits"),
]


@pytest.mark.parametrize(("keys", "word"), ILLEGAL_KEYS)
@pytest.mark.parametrize("device", [CPU, H200, MI300])
def test_illegal_keys_have_a_reason_everywhere(keys, word, device):
    with pytest.raises(NotImplementedError) as caught:
        choose(device, keys=keys)
    message = str(caught.value)
    assert all(repr(key) in message for key in keys)
    assert "TORCH_LOGS" in message and "explain" in message
    for backend in ("triton", "humming", "cpu"):
        assert word in refusal(device, keys, backend=backend)


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (None, "MoeProblem"),
        ("qwen", "MoeProblem"),
        (dataclasses.replace(PROBLEM, num_experts=0), "num_experts"),
        (dataclasses.replace(PROBLEM, top_k=None), "top_k"),  # type: ignore[arg-type]
        (dataclasses.replace(PROBLEM, hidden_size="64"), "hidden_size"),  # type: ignore[arg-type]
        (dataclasses.replace(PROBLEM, intermediate_size=-1), "intermediate_size"),
        (dataclasses.replace(PROBLEM, dtype=torch.int8), "torch.int8"),
        (dataclasses.replace(PROBLEM, dtype=torch.float64), "torch.float64"),
        (dataclasses.replace(PROBLEM, dtype=None), "dtype"),  # type: ignore[arg-type]
        (dataclasses.replace(PROBLEM, activation="swish"), "swish"),
        (dataclasses.replace(PROBLEM, activation=None), "activation"),  # type: ignore[arg-type]
    ],
)
def test_what_the_operator_does_not_define_is_refused(problem, word):
    for backend in ("triton", "cpu"):
        assert word in refusal(H200, problem=problem, backend=backend)
    with pytest.raises(NotImplementedError):
        choose(CPU, problem=problem)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("device", "backend"), [(CPU, "cpu"), (H200, "triton"), (MI300, "triton")])
def test_every_defined_problem_is_accepted(activation, dtype, device, backend):
    for gated in (True, False):
        problem = MoeProblem(3, 8, 33, 17, dtype, gated, activation, has_bias=gated)
        assert choose(device, problem=problem).backend == backend
        assert choose(device, backend, problem=problem) == Choice(backend, *W8A8)


class Hostile:
    """A value that fails whatever is done with it."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


GARBAGE = [None, 3, "x", (), [], {}, Hostile(), torch.ones(2), QuantKey(Hostile())]  # type: ignore[arg-type]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["problem", "weight_key", "activation_key", "device", "facts"])
def test_garbage_never_raises_anything_else(place, garbage):
    arguments = {"problem": PROBLEM, "weight_key": W8A8[0], "activation_key": W8A8[1]}
    arguments["device"] = H200
    if place == "facts":
        arguments["device"] = DeviceFacts("cuda", garbage, garbage)
    else:
        arguments[place] = garbage
    legal = (place == "activation_key" or place == "device") and garbage is None
    if legal:
        assert select_int8_moe_backend(**arguments).backend in ("triton", "cpu")
        return
    with pytest.raises(NotImplementedError):
        select_int8_moe_backend(**arguments)
    with pytest.raises(ValueError, match="triton"):
        select_int8_moe_backend(**arguments, backend="triton")


@pytest.mark.parametrize("backend", ["", "Triton", "vllm", None, 3, ["triton"], torch.ones(2)])
def test_an_unknown_backend_lists_the_known_ones(backend):
    with pytest.raises(ValueError) as caught:
        choose(CPU, backend)
    message = str(caught.value)
    assert repr(backend) in message
    assert all(repr(name) in message for name in ("auto", "triton", "humming", "cpu"))


@pytest.mark.parametrize("backend", ["triton", "humming"])
def test_a_named_backend_that_refuses_is_an_error_with_the_way_out(backend):
    message = refusal(CPU, backend=backend)
    assert message.startswith(f"backend: {backend!r}")
    assert all(repr(name) in message for name in ("auto", "triton", "humming", "cpu"))


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), CPU])
def test_a_device_may_be_facts_a_device_or_a_word(device):
    assert choose(device).backend == "cpu"
    assert DeviceFacts.of("cpu") == CPU == DeviceFacts.of(torch.device("cpu"))


def test_the_values_are_frozen_and_hashable():
    choice = choose(CPU)
    for value in (PROBLEM, CPU, choice, W8A8[0]):
        assert hash(value) == hash(dataclasses.replace(value))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, "other")


def test_a_made_up_device_is_asked_for_no_real_one(monkeypatch):
    def touched(*args: object) -> None:
        raise AssertionError("read a real device")

    for name in ("is_available", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(device_module, "read_facts", touched)
    assert choose(H200).backend == "triton"
    assert choose(CPU).backend == "cpu"


@dataclasses.dataclass
class Properties:
    """What torch.cuda.get_device_properties returns, as far as it is read."""

    major: int
    minor: int
    gcnArchName: str = "NVIDIA"
    multi_processor_count: int = 40
    shared_memory_per_block: int = 49_152
    shared_memory_per_block_optin: int = 65_536


@pytest.mark.parametrize(
    ("properties", "hip", "facts"),
    [
        (Properties(7, 5), None, DeviceFacts("cuda", (7, 5), "sm_75", 65_536, 40, False)),
        (Properties(9, 0), None, DeviceFacts("cuda", (9, 0), "sm_90", 65_536, 40, True)),
        (
            Properties(9, 4, "gfx942:xnack-", shared_memory_per_block_optin=0),
            "7.0",
            DeviceFacts("cuda", (9, 4), "gfx942:xnack-", 49_152, 40, True),
        ),
    ],
)
def test_facts_are_read_from_the_properties(monkeypatch, properties, hip, facts):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    device_module._cuda_facts.cache_clear()
    try:
        assert DeviceFacts.of("cuda:1") == facts
    finally:
        device_module._cuda_facts.cache_clear()


@pytest.mark.gpu
def test_the_real_gpu_is_served():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    facts = DeviceFacts.of("cuda")
    assert facts.capability and facts.shared_memory and facts.multiprocessors
    assert choose("cuda").backend == "triton"
