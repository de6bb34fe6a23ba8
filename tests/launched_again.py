"""Launch interpreted kernels again at bare addresses, as a driver does with compiled ones."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from int8moe_compile import compat_triton
from int8moe_compile.lowerings import launches

# Bytes of an address's memory that a tensor in its place shows: the interpreter takes its pointer.
SHOWN = 8


def tensor_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of memory that is there already."""
    memory = (ctypes.c_char * SHOWN).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=SHOWN // dtype.itemsize)


class Compiled:
    """Stand for what Triton compiles: it knows a kernel's types."""

    def __init__(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.types = tuple(getattr(getattr(a, "base", a), "dtype", None) for a in arguments)
        self.options = options

    def launch(self, programs: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        """Launch as a driver does: a type decides what a number is."""
        assert (y, z, stream) == (1, 1, 0) and len(arguments) == len(self.types)
        values = []
        for value, dtype in zip(arguments, self.types, strict=True):
            if isinstance(dtype, torch.dtype) and hasattr(value, "base"):
                base = tensor_at(value.base.data_ptr(), dtype)
                parts = (value.shape, value.strides, value.block_shape, value.padding)
                value = TensorDescriptor(base, *parts)
            elif isinstance(dtype, torch.dtype):
                assert type(value) is int, "a launcher would ask the driver for a tensor's address"
                value = tensor_at(value, dtype)
            values.append(value)
        self.kernel[(programs,)](*values, **self.options)


def launcher_of(kernel: Any, compiled: Compiled) -> compat_triton.Launcher:
    """Return how to launch an interpreted kernel again."""
    return compat_triton.Launcher(compiled.launch, (), compiled)


@contextmanager
def interpreted_launches() -> Any:
    """Let recordings of interpreted kernels be repeated."""
    add = launches.Recording.add_launch

    def add_launch(
        self: Any, kernel: Any, programs: int, compiled: Any, args: Any, given: dict[str, Any]
    ) -> None:
        names = kernel.arg_names
        options = {name: value for name, value in given.items() if name not in names}
        named = {name: value for name, value in given.items() if name in names}
        bound = launches._signature(kernel.fn).bind(*args, **named)
        bound.apply_defaults()
        compiled = Compiled(kernel, tuple(bound.arguments.values()), options)
        add(self, kernel, programs, compiled, args, given)

    with (
        mock.patch.object(launches.Recording, "add_launch", add_launch),
        mock.patch.object(compat_triton, "launcher_of", launcher_of),
        mock.patch.object(compat_triton, "binary_of", lambda compiled: None),
    ):
        yield
