"""The verbs a user types: quantise a model, switch the graph pass on and off, ask what it does."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import passes
from .compat import inductor_options
from .explain import explain
from .oracle import BACKENDS
from .quantization import quantize_

__all__ = ["disable", "enable", "enabled", "explain", "int8moe_backend", "quantize_"]


def enable(backend: str = "auto") -> None:
    """Let torch.compile turn every accepted experts call into one int8moe.experts.

    backend: "auto", or the name of the one that must run them; one that cannot is a ValueError
    from the compilation, or from the eager call of a layer on another device. A pass that stands
    in torch._inductor.config.joint_custom_pre_pass keeps running, before ours. What was compiled
    earlier is forgotten (torch.compiler.reset). torch.compile is lazy: call this before the first
    call of the compiled model.
    """
    _check_backend(backend)
    _register_with_transformers()
    passes.install(backend)
    torch.compiler.reset()


def disable() -> None:
    """Undo enable: put back what it found, and forget what was compiled."""
    passes.remove()
    torch.compiler.reset()


@contextlib.contextmanager
def enabled(backend: str = "auto") -> Iterator[None]:
    """Enable within a block, and return to what was before it; blocks may be nested.

    Every call of the compiled model belongs inside the block: leaving it forgets what was
    compiled (torch.compiler.reset), and a call behind it compiles again as set there.
    """
    outer = passes.installed()
    enable(backend)
    try:
        yield
    finally:
        if outer is None:
            disable()
        else:
            enable(outer.backend)


def int8moe_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile with Inductor and the graph pass: torch.compile(model, backend="int8moe").

    mode and options are Inductor's own. Nothing is left behind in the configuration.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    _register_with_transformers()
    patches = inductor_options(mode, options)
    slot = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    active = passes.installed()
    backend = "auto" if active is None else active.backend
    patches["joint_custom_pre_pass"] = passes.chained(slot, backend)
    return compile_fx(gm, list(example_inputs), config_patches=patches)


def _check_backend(backend: str) -> None:
    names = ("auto", *(known.name for known in BACKENDS))
    if backend not in names:
        wanted = ", ".join(repr(name) for name in names)
        raise ValueError(f"backend: wanted one of {wanted}, got {backend!r}")


def _register_with_transformers() -> None:
    """Register the Hugging Face side, where transformers is installed."""
    if importlib.util.find_spec("transformers") is not None:
        from . import hf  # noqa: F401
