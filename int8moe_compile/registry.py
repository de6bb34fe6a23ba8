"""Dotted names of everything that loads on first use: lowerings and kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

# Modules whose ``register()`` puts lowerings into Inductor. Loaded at the first trace.
LOWERINGS: Final[tuple[str, ...]] = ()

# Device type -> "module:function" that takes one ExpertsArguments, already checked.
KERNELS: Final[dict[str, str]] = {
    "cpu": "int8moe_compile.ops.cpu:experts",
}


@functools.cache
def kernel(device_type: str) -> Callable[..., Any]:
    """Import and return the experts kernel of a device type."""
    module, _, function = KERNELS[device_type].partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


@functools.cache
def load_lowerings() -> None:
    """Register every lowering with Inductor, once a process."""
    for name in LOWERINGS:
        importlib.import_module(name).register()
