"""What of compat.py concerns launches: of Triton's kernels again, and what torch knows of them."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# Releases whose launchers were read: how they are called, and that a number passes for a pointer.
KNOWN_TRITON = ("3.6.", "3.7.")


@dataclass(frozen=True)
class Launcher:
    """Hold how to launch a compiled kernel again.

    function(programs, 1, 1, stream, *before, *the kernel's arguments), with the address in place
    of a tensor. kernel: what was compiled, which must outlive its launches.
    """

    function: Callable[..., Any]
    before: tuple[Any, ...]
    kernel: Any


@dataclass(frozen=True)
class Map:
    """Hold what the driver needs of a descriptor of bytes: the box it is read in, and how.

    swizzle as the driver numbers it.
    """

    swizzle: int
    box: tuple[int, ...]


@dataclass(frozen=True)
class Binary:
    """Hold what the driver needs of a compiled kernel.

    types: Triton's name for each argument's type, "constexpr" for those that are compiled in; what
    the driver is given besides are two null pointers, as no scratch memory is asked for. For one
    that begins with "tensordesc" it is given a map, as maps has them in order, then sizes in 32 and
    strides in 64 bits.
    """

    function: int
    threads: int
    shared: int
    is_early: bool
    types: tuple[str, ...]
    maps: tuple[Map, ...]


@functools.cache
def _known_release() -> str:
    """Return the beginning of the installed Triton's version, "" if its launchers are unknown."""
    try:
        release = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((known for known in KNOWN_TRITON if release.startswith(known)), "")


def launcher_of(kernel: Any, compiled: Any) -> Launcher | None:
    """Return how to launch what ``kernel[grid](...)`` has compiled again; None if that is unknown.

    JITFunction.run binds, specialises and looks up at each launch, which takes the host longer
    than the launch itself. Removable when Triton offers launches of a compiled kernel that cost
    no more. CompiledKernel.run does it; in 3.6 what it wraps takes the same and scratch memory.
    """
    release = _known_release()
    has_parts = all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
    if not release or torch.version.hip is not None or not has_parts:
        return None
    # Looked at once: hooks that a kernel gets later are not called at repeats.
    if getattr(kernel, "pre_run_hooks", None):
        return None
    run, metadata = compiled.run, compiled.packed_metadata
    sizes = [getattr(run, f"{name}_scratch_size", None) for name in ("global", "profile")]
    if release == "3.6." and sizes == [0, 0] and hasattr(run, "launch"):
        kind = (run.launch_cooperative_grid, run.launch_pdl)
        before = (compiled.function, *kind, None, None, metadata, None, None, None)
        return Launcher(run.launch, before, compiled)
    return Launcher(run, (compiled.function, metadata, None, None, None), compiled)


def binary_of(compiled: Any) -> Binary | None:
    """Return what the driver needs of what launcher_of knows; None where it would need more.

    Removable together with launcher_of.
    """
    run, metadata = compiled.run, compiled.metadata
    asked = [getattr(run, f"{name}_scratch_size", None) for name in ("global", "profile")]
    is_plain = asked == [0, 0] and not run.launch_cooperative_grid and metadata.num_ctas == 1
    types = tuple(compiled.src.signature.values())
    if not is_plain or not all(isinstance(each, str) for each in types):
        return None
    described = sum(each.startswith("tensordesc") for each in types)
    known = tuple(map(_map_of, getattr(metadata, "tensordesc_meta", None) or ()))
    maps = tuple(each for each in known if each is not None)
    if len(maps) != described:
        return None
    threads = metadata.num_warps * metadata.target.warp_size
    return Binary(compiled.function, threads, metadata.shared, bool(run.launch_pdl), types, maps)


def _map_of(described: Any) -> Map | None:
    """Return what Triton says of a descriptor of bytes; None if it is one of something else."""
    if not isinstance(described, dict) or described.get("fp4_padded", True):
        return None
    box, swizzle = described.get("block_size"), described.get("swizzle")
    if described.get("elem_size") != 1 or box is None or swizzle is None:
        return None
    return Map(int(swizzle), tuple(int(size) for size in box))


def built_module(build: Any, source: str, name: str) -> Any | None:
    """Compile and load a Python module in C as Triton does its own; None if that fails.

    build: the module triton.runtime.build, whose cache serves. Removable when something public
    builds as small a module wherever Triton can launch.
    """
    if not _known_release():
        return None
    try:
        return build.compile_module_from_src(src=source, name=name)
    except Exception as error:  # whatever a compiler, a loader or a user's own builder raises
        log.debug("int8moe: launches repeat one by one, %s does not build: %s", name, error)
        return None


def launch_watch(runtime: Any) -> Callable[[], bool]:
    """Return a function that says whether anybody wants to be told of Triton's launches.

    runtime: triton.knobs.runtime. Removable together with launcher_of.
    """

    def is_watched() -> bool:
        # A chain of hooks that may be empty, None, or a function that somebody has put there.
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    return is_watched


def metadata_check(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a function that compares as many tensors with these, but for contents and addresses.

    Class, dispatch keys, dtype, device, sizes and strides, and whether a gradient would be wanted;
    it is False, too, if one is given twice. Dynamo's own guard: 0.8 us for seven tensors, of which
    Python reads as much in 2.9. It keeps no tensor alive. None where torch (2.11 and 2.13 do) does
    not have it; removable when torch has a public one.
    """
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards"):
        return None
    try:
        kept = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except TypeError:
        return None
    check: Callable[..., bool] = kept.check
    return check


def buffer_maker(device_type: str) -> Callable[..., Tensor] | None:
    """Return what makes a tensor of (sizes, strides, dtype) on the current device, past dispatch.

    None where torch (2.11 and 2.13 do) does not have it; a third of what torch.empty takes.
    Removable when that costs no more.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, f"_empty_strided_{device_type}", None)


def current_device(device_type: str) -> Callable[[], int]:
    """Return what tells the current device's number, without a look whether CUDA is running.

    Removable when torch.cuda.current_device costs no more.
    """
    return torch._C._cuda_getDevice if device_type == "cuda" else lambda: 0


def current_stream(device_type: str) -> Callable[[int], int]:
    """Return what tells the current stream of a device as the number that launches take.

    Removable when torch.cuda.current_stream makes no object of it.
    """
    if device_type == "cuda":
        return torch._C._cuda_getCurrentRawStream
    return lambda device: 0


def plain_keys() -> int:
    """Return the keys, as a number, by which plain CUDA tensors come into an autograd kernel.

    Nothing lies then between that and the CUDA kernel: no mode, no subclass, no transform; keys
    without a kernel are left out before.
    Removable together with compat.below_autograd.
    """
    keys, names = torch._C.DispatchKeySet, torch._C.DispatchKey
    both = keys(names.CUDA) | keys(names.AutogradCUDA)
    return int(both.raw_repr())
