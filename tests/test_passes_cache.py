"""Inductor's caches: a second process hits, another file or option of the package misses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from int8moe_compile.fingerprint import hash_files, package_files

PACKAGE = Path(__file__).resolve().parent.parent / "int8moe_compile"

# Compiles an experts module through the pass, and a direct call of the operator without it. Both
# graphs are one call, so that no C++ is built. Prints what the caches did for each.
SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
import int8moe_compile
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

def caches(function, *args):
    counters.clear()
    with torch.no_grad():
        result = torch.compile(function)(*args)
    return result, {
        "fx": "hit" if counters["inductor"]["fxgraph_cache_hit"] else "miss",
        "aot": "hit" if counters["aot_autograd"]["autograd_cache_hit"] else "miss",
        "bypass": counters["inductor"]["fxgraph_cache_bypass"],
    }

torch.manual_seed(0)
config = MixtralConfig(hidden_size=32, intermediate_size=16, num_local_experts=4)
config._experts_implementation = "grouped_mm"
experts = MixtralExperts(config)
with torch.no_grad():
    for parameter in experts.parameters():
        parameter.normal_()
experts = int8moe_compile.quantize_(experts.to(torch.bfloat16))
inputs = torch.randn(5, 32).bfloat16(), torch.arange(10).reshape(5, 2) % 4, torch.rand(5, 2)

def direct(x, ids, weights):
    return torch.ops.int8moe.experts(
        x, experts.gate_up_proj, experts.gate_up_proj_scale, experts.down_proj,
        experts.down_proj_scale, weights, ids)

alone, direct_caches = caches(direct, *inputs)
done = {"direct": direct_caches}
for backend in sys.argv[1:]:
    int8moe_compile.enable(backend)
    result, done[backend] = caches(experts, *inputs)
    assert torch.equal(result, alone), (result - alone).abs().max()
print(json.dumps(done))
"""


@dataclass
class Copy:
    """A copy of the package in a folder of its own, with caches of its own."""

    folder: Path

    def run(self, *backends: str) -> dict[str, dict[str, str]]:
        """Compile in a fresh process, the module once for each option of the pass."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *backends],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def append(self, name: str) -> None:
        """Change one file of the package by one byte."""
        with (self.folder / "int8moe_compile" / name).open("a") as file:
            file.write("\n")


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "int8moe_compile", ignore=ignored)
    return Copy(tmp_path)


HIT = {"fx": "hit", "aot": "hit", "bypass": 0}
MISS = {"fx": "miss", "aot": "miss", "bypass": 0}


def test_caches_between_processes(copy: Copy) -> None:
    assert copy.run("auto") == {"direct": MISS, "auto": MISS}
    assert copy.run("auto", "cpu") == {"direct": HIT, "auto": HIT, "cpu": MISS}
    copy.append("lowerings/experts.py")
    assert copy.run("auto") == {"direct": MISS, "auto": MISS}


def test_the_hash_covers_every_file(tmp_path: Path) -> None:
    files = package_files(PACKAGE)
    names = {file.relative_to(PACKAGE).as_posix() for file in files}
    assert {"api.py", "py.typed", "ops/reference.py", "hf/view.py", "passes/joint.py"} <= names
    assert any(name.endswith(".py.jinja") for name in names if name.startswith("lowerings/jinja"))
    listed = subprocess.run(
        ["git", "ls-files", "int8moe_compile", "ops", "lowerings"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    tracked = {
        name.removeprefix("int8moe_compile/")
        for name in listed
        if not (PACKAGE.parent / name).is_symlink() and (PACKAGE.parent / name).exists()
    }
    assert tracked <= names


@pytest.mark.parametrize("name", ["api.py", "ops/schema.py", "hf/view.py", "py.typed"])
def test_one_byte_changes_the_hash(name: str, copy: Copy) -> None:
    root = copy.folder / "int8moe_compile"
    before = hash_files(root)
    assert hash_files(root) == before
    copy.append(name)
    assert hash_files(root) != before
