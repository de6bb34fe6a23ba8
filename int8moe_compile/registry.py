"""Dotted names of everything that loads on first use: lowerings and kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

from .compat import add_to_inductor_key
from .fingerprint import package_hash

# Modules whose ``register()`` puts lowerings into Inductor. Loaded at the first trace.
LOWERINGS: Final[tuple[str, ...]] = (
    "int8moe_compile.lowerings.experts",
    "int8moe_compile.lowerings.dequantize",
)

# Device type -> "module:function" that computes int8moe::experts. The CPU's takes one
# ExpertsArguments, already checked; CUDA's the operator's own arguments, and checks those whose
# like it has not met.
KERNELS: Final[dict[str, str]] = {
    "cpu": "int8moe_compile.lowerings.cpu:experts",
    "cuda": "int8moe_compile.lowerings.prepared:experts",
}

# As the CPU's in KERNELS, for int8moe::humming_experts; imports humming-kernels.
HUMMING_KERNEL: Final = "int8moe_compile.lowerings.humming:experts"

# For int8moe::_wgmma_up, _wgmma_down and _stream, which take a layer half computed.
PRODUCT_KERNELS: Final[dict[str, str]] = {
    "_wgmma_up": "int8moe_compile.lowerings.wgmma:launch_up",
    "_wgmma_down": "int8moe_compile.lowerings.wgmma:launch_down",
    "_stream": "int8moe_compile.lowerings.stream:launch",
}

# "module:function" to tell that int8moe::dequantize was traced, and that one was lowered.
MARKER_TRACED: Final = "int8moe_compile.passes.notices:marker_traced"
MARKER_LOWERED: Final = "int8moe_compile.passes.notices:marker_lowered"


@functools.cache
def kernel(device_type: str) -> Callable[..., Any]:
    """Import and return the experts kernel of a device type, which takes what KERNELS says."""
    return _function(KERNELS[device_type])


@functools.cache
def humming_kernel() -> Callable[..., Any]:
    """Import and return the experts kernel that calls humming-kernels."""
    return _function(HUMMING_KERNEL)


@functools.cache
def product_kernel(name: str) -> Callable[..., Any]:
    """Import and return the launch of a product that graphs call as an operator."""
    return _function(PRODUCT_KERNELS[name])


@functools.cache
def load_lowerings() -> None:
    """Register every lowering with Inductor, once a process, and put them into its cache key."""
    for name in LOWERINGS:
        importlib.import_module(name).register()
    add_to_inductor_key("int8moe_compile", package_hash())


def marker_traced() -> None:
    """Load the lowerings and tell who wants to know that int8moe::dequantize is being traced."""
    load_lowerings()
    _function(MARKER_TRACED)()


def marker_lowered() -> None:
    """Tell who wants to know that an int8moe::dequantize is being lowered."""
    _function(MARKER_LOWERED)()


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
