"""Run a test file in a process of its own, where what it changes for good harms no other test."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(name: str, **environment: str) -> None:
    """Run one file of this folder under pytest; a failure shows its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-cov"]
    if not _has_coverage():
        command.pop()
    done = subprocess.run(
        [*command, str(TESTS / name)],
        cwd=TESTS.parent,
        env={**_own_environment(), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


def _own_environment() -> dict[str, str]:
    """Return the environment without what pytest's plugins tell their own processes."""
    theirs = ("PYTEST_", "COV_CORE_", "COVERAGE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


def _has_coverage() -> bool:
    return importlib.util.find_spec("pytest_cov") is not None
