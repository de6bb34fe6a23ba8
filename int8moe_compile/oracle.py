"""Pick the backend for a problem and two quantisation keys, or say why not; pure, no tensors."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch

from .ops.humming import ROW_MULTIPLE
from .ops.schema import ACTIVATIONS
from .schemes import INT8_DYNAMIC_TOKEN, INT8_STATIC_CHANNEL, QuantKey, pair_refusal

log = logging.getLogger(__name__)

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
CDNA: Final = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
HOW_TO_SEE: Final = (
    'TORCH_LOGS="+int8moe_compile" or int8moe_compile.explain(model) shows why each backend refuses'
)


@dataclass(frozen=True)
class MoeProblem:
    """Describe one mixture-of-experts block: local experts, sizes, activations' dtype, gate."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype = torch.bfloat16
    gated: bool = True
    activation: str = "silu"
    has_bias: bool = False


@dataclass(frozen=True)
class DeviceFacts:
    """State what the oracle must know about a device; None is "not known".

    type: "cpu", "cuda" (ROCm, too; "hip" means the same) or any other of torch's. capability:
    CUDA's (major, minor). arch: "sm_90", or on ROCm "gfx942" with or without feature flags behind
    a colon. shared_memory: most bytes that one block may use. int8_dot: the Triton at hand
    compiles an int8 ``tl.dot`` for this device.
    """

    type: str
    capability: tuple[int, int] | None = None
    arch: str | None = None
    shared_memory: int | None = None
    multiprocessors: int | None = None
    int8_dot: bool = True

    @classmethod
    def of(cls, device: torch.device | str | None = None) -> DeviceFacts:
        """Read the facts of a real device; None is the accelerator in use, or else the CPU."""
        from .device import read_facts

        return read_facts(device)


@dataclass(frozen=True)
class Choice:
    """Name the backend that runs a problem; reasons holds why each one asked before refused."""

    backend: str
    weight_key: QuantKey
    activation_key: QuantKey | None
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)


class Backend(Protocol):
    """Say whether one family of kernels can run a problem."""

    @property
    def name(self) -> str:
        """Return the word by which a user asks for this backend."""

    def refusal(
        self,
        problem: MoeProblem,
        weight_key: QuantKey,
        activation_key: QuantKey | None,
        device: DeviceFacts,
    ) -> str | None:
        """Return why it cannot, None if it can; problem and keys are legal already."""


@dataclass(frozen=True)
class TritonBackend:
    """Triton kernels: CUDA from sm_75 where the int8 dot compiles, ROCm CDNA."""

    name: str = "triton"

    def refusal(
        self,
        problem: MoeProblem,
        weight_key: QuantKey,
        activation_key: QuantKey | None,
        device: DeviceFacts,
    ) -> str | None:
        """Judge the device; every problem and every legal pair of keys is served."""
        if device.type not in ("cuda", "hip"):
            return f"needs a CUDA or ROCm device, got {device.type!r}"
        if device.arch is not None and device.arch.startswith("gfx"):
            if device.arch.partition(":")[0] not in CDNA:
                return f"on ROCm needs a CDNA device ({', '.join(CDNA)}), got {device.arch!r}"
        elif device.capability is None:
            return "the compute capability of the CUDA device is not known"
        elif tuple(device.capability) < (7, 5):
            return f"needs compute capability 7.5 (sm_75) or newer, got {_sm(device)}"
        if not device.int8_dot:
            where = device.arch or _sm(device)
            return f"the Triton at hand does not compile an int8 dot for {where}"
        return None


def _importable(module: str) -> bool:
    """Say whether a top-level module could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True)
class HummingBackend:
    """Kernels of the humming-kernels package: CUDA from sm_80, channel weights, token activations.

    ``importable`` finds the package, so that tests can ask about either.
    """

    name: str = "humming"
    importable: Callable[[str], bool] = _importable

    def refusal(
        self,
        problem: MoeProblem,
        weight_key: QuantKey,
        activation_key: QuantKey | None,
        device: DeviceFacts,
    ) -> str | None:
        """Judge package, device, keys and problem, in this order."""
        if not self.importable("humming"):
            return 'humming-kernels is not installed: pip install "int8moe_compile[humming]"'
        is_cuda = device.type == "cuda" and not (device.arch or "").startswith("gfx")
        if not is_cuda or device.capability is None or tuple(device.capability) < (8, 0):
            got = _sm(device) if is_cuda else repr(device.arch or device.type)
            return f"needs a CUDA device of compute capability 8.0 or newer, got {got}"
        if (weight_key, activation_key) != (INT8_STATIC_CHANNEL, INT8_DYNAMIC_TOKEN):
            return "needs weights per channel and activations dynamic per token"
        if problem.dtype == torch.float32:
            return "needs bfloat16 or float16 activations, got float32"
        if problem.has_bias or not problem.gated or problem.activation != "silu":
            return "needs gated silu experts without bias"
        sizes = (problem.hidden_size, problem.intermediate_size)
        if any(size % ROW_MULTIPLE for size in sizes):
            return f"needs hidden and intermediate size multiples of {ROW_MULTIPLE}, got {sizes}"
        return None


@dataclass(frozen=True)
class CpuBackend:
    """The CPU kernel, which runs whatever the operator defines."""

    name: str = "cpu"

    def refusal(
        self,
        problem: MoeProblem,
        weight_key: QuantKey,
        activation_key: QuantKey | None,
        device: DeviceFacts,
    ) -> str | None:
        """Judge the device alone."""
        return None if device.type == "cpu" else f"needs a CPU, got {device.type!r}"


BACKENDS: Final[tuple[Backend, ...]] = (TritonBackend(), HummingBackend(), CpuBackend())


def select_int8_moe_backend(
    problem: MoeProblem,
    weight_key: QuantKey,
    activation_key: QuantKey | None,
    backend: str = "auto",
    device: DeviceFacts | torch.device | str | None = None,
) -> Choice:
    """Choose the backend for one block; "auto" takes the first that accepts.

    device: facts (made-up ones are fine), or a device whose facts are read; None is the
    accelerator in use, or else the CPU. A named backend is honoured or ValueError says why not.
    NotImplementedError when "auto" finds none. Nothing else is raised, whatever the arguments are.
    """
    names = [known.name for known in BACKENDS]
    expected = ", ".join(repr(name) for name in ("auto", *names))
    if not isinstance(backend, str) or backend not in ("auto", *names):
        raise ValueError(f"backend: wanted one of {expected}, got {_shown(backend)}")
    facts = _facts(device)
    reasons: dict[str, str] = {}
    for candidate in BACKENDS:
        if backend not in ("auto", candidate.name):
            continue
        reason = _refusal(candidate, problem, weight_key, activation_key, facts)
        if reason is None:
            log.debug("backend %s accepts %s", candidate.name, _shown(problem))
            return Choice(candidate.name, weight_key, activation_key, reasons)
        log.debug("backend %s refuses %s: %s", candidate.name, _shown(problem), reason)
        reasons[candidate.name] = reason
    if backend != "auto":
        raise ValueError(
            f"backend: {backend!r} cannot run this problem: {reasons[backend]}; "
            f"expected one of {expected}"
        )
    raise NotImplementedError(
        f"no INT8 MoE backend accepts weight key {_shown(weight_key)} with activation key "
        f"{_shown(activation_key)} on device {_shown(facts.type)}; {HOW_TO_SEE}"
    )


def _refusal(
    candidate: Backend,
    problem: object,
    weight_key: object,
    activation_key: object,
    device: DeviceFacts,
) -> str | None:
    """Ask one backend, after what none of them can run; a check that fails is a refusal, too."""
    try:
        reason = pair_refusal(weight_key, activation_key) or _problem_refusal(problem)
        if reason is None:
            reason = candidate.refusal(problem, weight_key, activation_key, device)  # type: ignore[arg-type]
    except Exception as error:
        return f"its check failed with {type(error).__name__}: {_shown(error)}"
    return reason


def _problem_refusal(problem: object) -> str | None:
    """Say what the operator itself does not define about a problem."""
    if not isinstance(problem, MoeProblem):
        return f"problem: wanted a MoeProblem, got {_shown(problem)}"
    for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
        size = getattr(problem, name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            return f"problem: {name}: wanted a positive integer, got {_shown(size)}"
    if problem.dtype not in DTYPES:
        wanted = ", ".join(str(dtype) for dtype in DTYPES)
        return f"problem: dtype: wanted one of {wanted}, got {_shown(problem.dtype)}"
    if problem.activation not in ACTIVATIONS:
        wanted = ", ".join(repr(word) for word in ACTIVATIONS)
        return f"problem: activation: wanted one of {wanted}, got {_shown(problem.activation)}"
    return None


def _facts(device: DeviceFacts | torch.device | str | None) -> DeviceFacts:
    """Return the facts about whatever names a device; an unreadable one is of an unknown type."""
    if isinstance(device, DeviceFacts):
        return device
    try:
        return DeviceFacts.of(device)
    except Exception as error:
        log.debug("device %s cannot be read: %s", _shown(device), _shown(error))
        return DeviceFacts(type=device if isinstance(device, str) else _shown(device))


def _sm(device: DeviceFacts) -> str:
    """Write a compute capability as sm_XY."""
    if device.capability is None:
        return "an unknown capability"
    return "sm_{}{}".format(*device.capability)


def _shown(value: object) -> str:
    """Write any value into a message, also one whose repr fails."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__} without a repr>"
