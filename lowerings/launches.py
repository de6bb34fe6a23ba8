"""Make the buffers and launches of eager calls, and let a recording know of them.

A call launches what its arguments' sizes, strides, dtypes and alignment say, never what their
values say. So what one call did serves the next one of the same kind, with other addresses.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Name where an argument points: "argument" or "buffer", which of them, bytes into it."""

    kind: str
    index: int
    offset: int = 0


@dataclass(frozen=True)
class Described:
    """Stand for a tensor descriptor: where its tensor begins, and the one that was made."""

    base: Place
    descriptor: Any


@dataclass(frozen=True)
class Launch:
    """Keep one launch: the kernel, what Triton compiled, its programs, arguments in its order.

    arguments: Place for each tensor, Described for each descriptor, else the value.
    """

    kernel: Any
    compiled: Any
    programs: int
    arguments: tuple[Any, ...]


_signature = functools.cache(inspect.signature)


@dataclass
class Recording:
    """Collect what one call makes and launches.

    tensors: the call's own. buffers are kept, so that no two of them have the same address.
    refusal: why the call cannot be repeated; "" if it can.
    """

    tensors: Sequence[Tensor]
    buffers: list[Tensor] = field(default_factory=list)
    zeroed: set[int] = field(default_factory=set)
    launches: list[Launch] = field(default_factory=list)
    refusal: str = ""

    def add_buffer(self, buffer: Tensor, *, is_zeroed: bool) -> None:
        """Take a new buffer into account."""
        if is_zeroed:
            self.zeroed.add(len(self.buffers))
        self.buffers.append(buffer)

    def add_launch(
        self, kernel: Any, programs: int, compiled: Any, args: Any, given: dict[str, Any]
    ) -> None:
        """Take a launch into account."""
        names = kernel.arg_names
        named = {name: value for name, value in given.items() if name in names}
        bound = _signature(kernel.fn).bind(*args, **named)
        bound.apply_defaults()
        arguments = tuple(self._resolved(value) for value in bound.arguments.values())
        self.launches.append(Launch(kernel, compiled, programs, arguments))

    def refuse(self, reason: str) -> None:
        """Let the call never be repeated."""
        self.refusal = self.refusal or reason

    def place_of(self, tensor: Tensor) -> Place | None:
        """Return where a tensor points; None if it is neither an argument's nor in a buffer."""
        address = tensor.data_ptr()
        for index, known in enumerate(self.tensors):
            if known.data_ptr() == address:
                return Place("argument", index)
        for index, buffer in enumerate(self.buffers):
            offset = address - buffer.data_ptr()
            if 0 <= offset < buffer.nbytes:
                return Place("buffer", index, offset)
        return None

    def _resolved(self, value: Any) -> Any:
        base = getattr(value, "base", None)
        tensor = value if isinstance(value, Tensor) else base
        if not isinstance(tensor, Tensor):
            return value
        place = self.place_of(tensor)
        if place is None:
            self.refuse("a kernel reads a tensor that the call made in passing")
            return None
        return place if tensor is value else Described(place, value)


class _Current(threading.local):
    """Hold the recording of a thread's call, if there is one."""

    recording: Recording | None = None


_current: Final = _Current()


def current_recording() -> Recording | None:
    """Return the recording of the call that this thread is in, if there is one."""
    return _current.recording


@contextmanager
def recorded(recording: Recording) -> Iterator[None]:
    """Record the buffers and launches of this thread."""
    _current.recording = recording
    try:
        yield
    finally:
        _current.recording = None


def empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new buffer that kernels write."""
    buffer = torch.empty(sizes, dtype=dtype, device=device)
    if _current.recording is not None:
        _current.recording.add_buffer(buffer, is_zeroed=False)
    return buffer


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new buffer of zeros."""
    buffer = torch.zeros(sizes, dtype=dtype, device=device)
    if _current.recording is not None:
        _current.recording.add_buffer(buffer, is_zeroed=True)
    return buffer


def launch(kernel: Any, programs: int, *args: Any, **given: Any) -> None:
    """Launch so many programs of a kernel on the current device."""
    compiled = kernel[(programs,)](*args, **given)
    if _current.recording is not None:
        _current.recording.add_launch(kernel, programs, compiled, args, given)
