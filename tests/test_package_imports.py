"""Imports: what a bare import loads, and that imports between the folders point one way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "int8moe_compile"
HEAVY = ("triton", "transformers")

# What a file may never import: hf -> passes -> ops <- lowerings -> oracle. Files of the package
# itself that none of them lists may import everything (api, cli and the like).
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "ops": ("hf", "passes", "lowerings", "oracle", "device", "api", "cli"),
    "lowerings": ("hf", "passes", "api", "cli"),
    "passes": ("hf", "lowerings", "cli"),
    "hf": ("lowerings", "cli"),
    **dict.fromkeys(
        (
            "checkpoint_schemes",
            "compat",
            "compat_inductor",
            "compat_triton",
            "device",
            "errors",
            "oracle",
            "registry",
            "schemes",
            "structure",
        ),
        ("hf", "passes", "lowerings", "api", "cli"),
    ),
}


def run_fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, from the repository root."""
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def module_files() -> dict[str, Path]:
    """Map each module of the package, by its name below the package, to its file."""
    files = {}
    for folder in ("", "ops", "lowerings"):
        root = ROOT / (folder or PACKAGE)
        for path in root.rglob("*.py"):
            parts = [folder, *path.relative_to(root).with_suffix("").parts]
            name = ".".join(part for part in parts if part and part != "__init__")
            if folder or not name.startswith(("ops", "lowerings")):
                files[name] = path
    return files


def imported(name: str, path: Path) -> set[str]:
    """List every module that a file imports, anywhere in it, with absolute dotted names."""
    is_package = path.name == "__init__.py"
    here = [PACKAGE, *([part for part in name.split(".") if part])]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = here[: len(here) - up] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


MODULES = module_files()


def test_the_walk_sees_every_folder():
    assert {"", "oracle", "hf", "passes", "ops.register", "lowerings"} <= set(MODULES)
    assert f"{PACKAGE}.registry" in imported("ops.register", MODULES["ops.register"])
    assert f"{PACKAGE}.ops.schema" in imported("ops.register", MODULES["ops.register"])


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str):
    first = name.partition(".")[0]
    wrong = [
        module
        for module in imported(name, MODULES[name])
        for banned in FORBIDDEN.get(first, ())
        if f"{module}.".startswith(f"{PACKAGE}.{banned}.")
    ]
    assert not wrong, f"{name} imports {wrong}"


@pytest.mark.parametrize("name", MODULES)
def test_triton_and_transformers_stay_in_their_folders(name: str):
    modules = {module.partition(".")[0] for module in imported(name, MODULES[name])}
    if not name.startswith("lowerings"):
        assert "triton" not in modules
    if not name.startswith("hf"):
        at_the_top = {
            alias.name if isinstance(node, ast.Import) else node.module
            for node in ast.parse(MODULES[name].read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not any((module or "").startswith("transformers") for module in at_the_top)


@pytest.mark.parametrize("name", MODULES)
def test_only_compat_looks_at_versions(name: str):
    if name in ("compat", "compat_inductor"):
        return
    tree = ast.parse(MODULES[name].read_text())
    assert not any(
        module.startswith(("packaging", "torch.torch_version"))
        for module in imported(name, MODULES[name])
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("__version__", "TorchVersion"):
            assert ast.unparse(node).startswith(f"{PACKAGE}."), ast.unparse(node)


def test_a_bare_import_loads_neither_triton_nor_transformers():
    code = (
        "import sys, torch, int8moe_compile\n"
        "import int8moe_compile.oracle, int8moe_compile.schemes, int8moe_compile.device\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        f"loaded += [n for n in sys.modules if n.startswith(('{PACKAGE}.hf', '{PACKAGE}.lower'))]\n"
        "assert not loaded, loaded\n"
        "print(torch.ops.int8moe.experts, torch.ops.int8moe.dequantize)"
    )
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["int8moe.experts", "int8moe.dequantize"]
    assert done.stderr == ""


@pytest.mark.parametrize("absent", HEAVY)
def test_the_package_imports_where_one_is_absent(absent: str):
    code = (
        f"import sys; sys.modules['{absent}'] = None\n"
        "import torch, int8moe_compile.oracle as o, int8moe_compile.schemes as s\n"
        "p = o.MoeProblem(8, 2, 64, 48)\n"
        "keys = s.INT8_STATIC_CHANNEL, s.INT8_DYNAMIC_TOKEN\n"
        "print(o.select_int8_moe_backend(p, *keys, device='cpu').backend)"
    )
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "cpu"


ASK = (
    "import int8moe_compile.oracle as o, int8moe_compile.schemes as s\n"
    "p = o.MoeProblem(8, 2, 64, 48)\n"
    "keys = s.INT8_STATIC_CHANNEL, s.INT8_DYNAMIC_TOKEN\n"
    "print(o.select_int8_moe_backend(p, *keys, device='cpu').backend)\n"
)


# torch looks for the modules named in TORCH_LOGS while it is being imported, and imports them.
@pytest.mark.parametrize("first", ["torch", PACKAGE])
def test_torch_logs_shows_the_refusals(first: str):
    code = f"import {first}\nimport {PACKAGE}.hf, {PACKAGE}.passes\n{ASK}"
    done = run_fresh(code, TORCH_LOGS=f"+{PACKAGE}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "cpu"
    assert "backend triton refuses" in done.stderr and "got 'cpu'" in done.stderr
    assert "backend humming refuses" in done.stderr


def test_nothing_is_logged_unasked():
    done = run_fresh(f"import torch\n{ASK}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_standard_logging_tree_carries_the_refusals():
    done = run_fresh(f"import logging; logging.basicConfig(level=logging.DEBUG)\n{ASK}")
    assert done.returncode == 0, done.stderr
    assert f"DEBUG:{PACKAGE}.oracle:backend triton refuses" in done.stderr
