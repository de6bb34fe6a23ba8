"""Hash the whole package, so that compiled code made by another version of it is never reused."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path


@functools.cache
def package_hash() -> str:
    """Return the hash of this package, read once a process.

    What is imported does not change when a file does.
    """
    return hash_files(Path(__file__).resolve().parent)


def hash_files(root: Path) -> str:
    """Return the SHA-256 of every file of the package, with their names."""
    hashed = hashlib.sha256()
    for path in package_files(root):
        hashed.update(path.relative_to(root).as_posix().encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def package_files(root: Path) -> list[Path]:
    """List the files of the package, byte code apart; two of its folders may be links."""
    found: list[Path] = []
    for folder, below, names in os.walk(root, followlinks=True):
        below[:] = [name for name in below if name != "__pycache__"]
        found.extend(Path(folder) / name for name in names if not name.endswith(".pyc"))
    return sorted(found)
