"""Start processes with no compiler, a broken one, and an empty cache that two of them share."""

from __future__ import annotations

import os
import platform
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import problem, with_scheme

from int8moe_compile.lowerings import cpu_build

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from support import problem
case = problem(1, activation="relu")
assert torch.equal(case.run(), case.reference())
case.run()
from int8moe_compile.lowerings import cpu_build
print("compiled" if cpu_build.kernel() else "plain")
""".format(root=str(ROOT), tests=str(ROOT / "tests"))

needs_compiler = pytest.mark.skipif(
    cpu_build.kernel() is None, reason="no C++ compiler that makes the kernel"
)


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, "-c", SCRIPT]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=settings, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.strip(), err


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def assert_plain(environment: dict[str, str], cache: Path, reason: str) -> None:
    out, err = finish(start(cache, **environment))
    assert out == "plain"
    assert err.count("int8moe:") == 1, err
    assert reason in err


def test_no_compiler_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = {"PATH": str(tmp_path / "empty"), "CXX": ""}
    assert_plain(environment, tmp_path / "cache", "no C++ compiler found")


def test_a_named_compiler_is_not_replaced(tmp_path: Path) -> None:
    assert_plain({"CXX": "no-such-compiler"}, tmp_path, "CXX='no-such-compiler'")


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    # answers what is asked of it first, then cannot compile
    body = 'case "$*" in *-dM*) exit 0;; esac\necho this compiler is broken >&2\nexit 1'
    compiler = script(tmp_path / "broken", body)
    assert_plain({"CXX": compiler}, tmp_path / "cache", "this compiler is broken")
    assert not [path for path in (tmp_path / "cache").rglob("*.so")]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_plain({}, tmp_path / "file", str(tmp_path / "file"))


@needs_compiler
def test_processes_that_start_together_share_one_library(tmp_path: Path) -> None:
    compiler = cpu_build.find_compiler()
    count = f'echo "$*" >> {tmp_path}/calls\nexec {shlex.join(compiler)} "$@"'
    counting = script(tmp_path / "counting", count)
    cache = tmp_path / "cache"
    processes = [start(cache, CXX=counting) for _ in range(2)]
    assert [finish(process)[0] for process in processes] == ["compiled", "compiled"]
    assert finish(start(cache, CXX=counting))[0] == "compiled"
    compilations = (tmp_path / "calls").read_text().count(" -o ")
    assert compilations == 1
    assert len([path for path in cache.rglob("*.so")]) == 1


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 instruction set")
def test_instruction_sets_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable lanes agree with this machine's, whatever those are."""
    cases = [
        with_scheme(problem(1, T=11, H=75, I=41, K=3, activation=name), word)
        for name in ("silu", "gelu", "gelu_tanh")
        for word in ("token", "tensor", "static")
    ]
    wanted = [case.run() for case in cases]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_build, "MACHINE_FLAGS", {"x86_64": "-march=x86-64"})
    portable = cpu_build.load()
    assert portable.lanes == "portable"
    monkeypatch.setattr(cpu_build, "kernel", lambda: portable.run)
    for case, bits in zip(cases, wanted, strict=True):
        assert torch.equal(case.run(), bits)


def test_a_named_compiler_may_have_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -m 'some compiler'")
    assert cpu_build.find_compiler() == [sys.executable, "-m", "some compiler"]
