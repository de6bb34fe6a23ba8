"""Compile the C++ kernel of lowerings/cpp once a machine, and load it once a process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock

from ..compat import inductor_cache_dir

log = logging.getLogger(__name__)

SOURCES: Final = Path(__file__).with_name("cpp")
MAIN: Final = SOURCES / "experts.cpp"
# -ffp-contract=off: a contracted product rounds once in a vector body and twice in its tail.
FLAGS: Final = (
    *("-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
OPENMP: Final = "-fopenmp"
# clang knows only -mcpu on Arm.
MACHINE_FLAGS: Final = {"aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


class BuildError(RuntimeError):
    """The kernel cannot be compiled or loaded here; the message says why."""


@dataclass(frozen=True)
class Library:
    """A loaded kernel: takes one packed call, returns 0; and the instruction set it uses."""

    run: Callable[[bytes], int]
    lanes: str


@functools.cache
def kernel() -> Callable[[bytes], int] | None:
    """Return the compiled kernel, or None (logged once, with the reason) where there is none."""
    try:
        library = load()
    except (BuildError, OSError) as error:
        log.warning(
            "int8moe: CPU calls run the plain PyTorch kernel, which is slower: %s. Install g++ or "
            "clang++, or name a C++17 compiler in CXX.",
            error,
        )
        return None
    log.debug("int8moe: CPU kernel for %s", library.lanes)
    return library.run


def load() -> Library:
    """Load the kernel, compiled first if need be. Raises BuildError or OSError."""
    loaded = ctypes.CDLL(str(built()))
    loaded.int8moe_lanes.restype = ctypes.c_char_p
    run = loaded.int8moe_experts
    run.argtypes = [ctypes.c_char_p]
    run.restype = ctypes.c_int
    return Library(run, loaded.int8moe_lanes().decode())


def find_compiler() -> list[str]:
    """Return the command in CXX when it is set ("ccache g++", too), else g++, clang++ or c++.

    Raises BuildError when none is there.
    """
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++", "c++"]:
        program, *options = shlex.split(name)
        path = shutil.which(program)
        if path is not None:
            return [path, *options]
    raise BuildError(f"no C++ compiler found (CXX={named!r})")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def built() -> Path:
    """Return the shared library for this source, compiler and processor, compiled if need be.

    The cache key holds the compiler's predefined macros: they name its version and every
    instruction set it would use, so machines of different kinds may share one cache directory.
    """
    if sys.platform == "win32":
        raise BuildError("the C++ kernel is not built on Windows")
    compiler = find_compiler()
    flags = [*FLAGS, MACHINE_FLAGS.get(platform.machine(), "-march=native")]
    macros = _run([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256("\0".join([*compiler, *flags, macros]).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            key.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = Path(inductor_cache_dir()) / "int8moe"
    library = folder / f"experts_{key.hexdigest()[:32]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{library}.lock"):
            if not library.exists():
                _compile(compiler, flags, library)
    return library


def _compile(compiler: list[str], flags: list[str], library: Path) -> None:
    """Compile into a temporary file beside the library, then rename: nobody sees half a file."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [*compiler, *flags, str(MAIN), "-o", name]
    try:
        try:
            _run([*command, OPENMP])
        except BuildError as error:
            log.debug("int8moe: no OpenMP for the CPU kernel, it runs on one thread: %s", error)
            _run(command)
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)
