"""Plan the launches of a repeated call as numbers, for the function of cpp/launch.c."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from triton.runtime import build

from .. import compat_triton
from .launches import Described, Launch, Place

SOURCE: Final = Path(__file__).with_name("cpp") / "launch.c"
# As in cpp/launch.c.
CONSTANT, ADDRESS, SCRATCH, OUTPUT, MAP = range(5)
MOST_PARAMETERS: Final = 64
MOST_ADDRESSES: Final = 16
MOST_MAPS: Final = 6
MOST_RANK: Final = 5
NUMBER_BYTES: Final = 8

# The driver's number for elements of one byte, the only ones that come by descriptor.
BYTES: Final = 0

# How struct names what Triton's types are.
FORMATS: Final = {
    **{"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q"},
    **{"u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"},
    **{"fp32": "f", "fp64": "d"},
}

# Launches a plan: (plan, addresses, output, scratch, stream, device).
LaunchAll = Callable[[bytes, tuple[int, ...], int, int, int, int], None]


@functools.cache
def launch_all() -> LaunchAll | None:
    """Return what launches plans; None where it cannot be built."""
    module = compat_triton.built_module(build, SOURCE.read_text(), "int8moe_launch")
    return None if module is None else module.launch


def plan_of(
    launches: list[Launch], tensors: int, output: int, offset_of: Callable[[Place], int]
) -> bytes | None:
    """Return launches as bytes; None if one passes what they cannot say.

    tensors: how many the call has; output: which buffer the result is; offset_of: where in the
    scratch memory a place in another buffer is.
    """
    numbers = [len(launches)]
    for launch in launches:
        binary = compat_triton.binary_of(launch.compiled)
        if binary is None or launch.programs <= 0 or tensors > MOST_ADDRESSES:
            return None
        maps = iter(binary.maps)
        parameters: list[tuple[int, ...] | None] = []
        for value, kind in zip(launch.arguments, binary.types, strict=True):
            if kind.startswith("tensordesc"):
                parameters += _described(value, next(maps, None), output, offset_of)
            elif kind != "constexpr":
                parameters.append(_parameter(value, kind, output, offset_of))
        # For scratch memory, of which there is none.
        parameters += [(CONSTANT, 0), (CONSTANT, 0)]
        if len(parameters) > MOST_PARAMETERS or len(binary.maps) > MOST_MAPS:
            return None
        numbers += [binary.function, launch.programs, binary.threads, binary.shared]
        numbers += [int(binary.is_early), len(parameters)]
        for parameter in parameters:
            if parameter is None:
                return None
            numbers += parameter
    return struct.pack(f"={len(numbers)}Q", *numbers)


def _described(
    value: Any, known: compat_triton.Map | None, output: int, offset_of: Callable[[Place], int]
) -> list[tuple[int, ...] | None]:
    """Return the parameters of a descriptor: a tensor map, sizes, strides."""
    if not isinstance(value, Described) or known is None or value.descriptor.padding != "zero":
        return [None]
    base = _parameter(value.base, "*", output, offset_of)
    sizes, strides = list(value.descriptor.shape), list(value.descriptor.strides)
    if base is None or len(sizes) > MOST_RANK:
        return [None]
    numbers = [MAP, len(sizes), *base, BYTES, known.swizzle]
    dimensions = list(zip(sizes, strides, known.box, strict=True))
    for turn, (size, stride, box) in enumerate(reversed(dimensions)):
        numbers += [size, stride if turn else 0, box]
    plain = [("i32", size) for size in sizes] + [("i64", stride) for stride in strides]
    return [
        tuple(numbers),
        *(_parameter(number, kind, output, offset_of) for kind, number in plain),
    ]


def _parameter(
    value: Any, kind: str, output: int, offset_of: Callable[[Place], int]
) -> tuple[int, int] | None:
    if isinstance(value, Place):
        if not kind.startswith("*"):
            return None
        if value.kind == "argument":
            return ADDRESS, value.index
        is_output = value.index == output
        return (OUTPUT, value.offset) if is_output else (SCRATCH, offset_of(value))
    if kind not in FORMATS or not isinstance(value, int | float):
        return None
    raw = struct.pack(f"={FORMATS[kind]}", value).ljust(NUMBER_BYTES, b"\0")
    return CONSTANT, int.from_bytes(raw, "little")
