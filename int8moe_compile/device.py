"""Read the facts about a real device; the only reader of torch.cuda properties."""

from __future__ import annotations

import functools
import os

import torch

from .compat import int8_dot_compiles
from .oracle import DeviceFacts


def read_facts(device: torch.device | str | None = None) -> DeviceFacts:
    """Return the facts of a device; None is the accelerator in use, or else the CPU.

    A CUDA device on a machine without one gives facts that are not known, and no error, so that
    the oracle can say so.
    """
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return DeviceFacts(type=device.type)
    if not torch.cuda.is_available():
        return DeviceFacts(type="cuda", int8_dot=False)
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


def unusable(device: torch.device | str) -> str | None:
    """Say why this torch cannot compute on a device here, None if it can."""
    try:
        torch.ones(1, device=device).item()
    except (AssertionError, RuntimeError, TypeError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def total_memory(device: torch.device | str) -> int:
    """Return the bytes of a device's memory; 2**47, more than any address, where nothing tells."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no sysconf, or one without these names
        return 2**47


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    """Read a CUDA or ROCm device once a process."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    is_rocm = torch.version.hip is not None
    return DeviceFacts(
        type="cuda",
        capability=capability,
        arch=properties.gcnArchName if is_rocm else "sm_{}{}".format(*capability),
        # Absent from ROCm builds; there all of the per-block memory is always usable.
        shared_memory=getattr(properties, "shared_memory_per_block_optin", None)
        or getattr(properties, "shared_memory_per_block", None),
        multiprocessors=properties.multi_processor_count,
        int8_dot=int8_dot_compiles(capability, is_rocm),
    )
