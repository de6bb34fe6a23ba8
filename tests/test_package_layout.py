"""Layout: one package from three folders, as listed, linked and mapped; sizes of its parts."""

from __future__ import annotations

import ast
import glob
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import int8moe_compile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "int8moe_compile"
LINKS = {"ops": "../ops", "lowerings": "../lowerings"}
SOURCE_FOLDERS = (PACKAGE, "ops", "lowerings", "tests", "scripts", "benchmarks")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources(*suffixes: str) -> list[Path]:
    """List the files of the repository with these suffixes, each once (links are not followed)."""
    found = []
    for folder in SOURCE_FOLDERS:
        for parent, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            found += [Path(parent, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_folders() -> dict[str, Path]:
    """Map the dotted name of each folder with Python files, through the links, to its path."""
    folders = {}
    for parent, children, names in os.walk(ROOT / PACKAGE, followlinks=True):
        children[:] = [name for name in children if name != "__pycache__"]
        if any(name.endswith(".py") for name in names):
            folders[".".join(Path(parent).relative_to(ROOT).parts)] = Path(parent)
    return folders


def test_the_links_are_relative_and_lead_to_the_folders():
    for link, target in LINKS.items():
        path = ROOT / PACKAGE / link
        assert path.is_symlink(), f"{link} is no link: was the checkout made without symlinks?"
        assert os.readlink(path) == target
        assert (ROOT / link).samefile(path)
        assert (ROOT / link).is_dir() and not (ROOT / link).is_symlink()


def test_the_packages_are_the_folders():
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(package_folders())
    assert f"{PACKAGE}.lowerings.jinja" in listed
    for name, folder in package_folders().items():
        assert (folder / "__init__.py").is_file(), f"{name} has no __init__.py"


def test_the_mapping_is_the_links():
    mapping = dict(PYPROJECT["tool"]["setuptools"]["package-dir"])
    assert mapping.pop(PACKAGE) == PACKAGE
    assert mapping == {f"{PACKAGE}.{link}": link for link in LINKS}
    assert set(PYPROJECT["tool"]["coverage"]["run"]["source"]) == {PACKAGE, *LINKS}


def test_every_data_file_is_shipped():
    folders = package_folders()
    shipped = {
        Path(found).resolve()
        for name, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for found in glob.glob(str(folders[name] / pattern), recursive=True)
    }
    assert (ROOT / PACKAGE / "py.typed").resolve() in shipped
    for folder in (PACKAGE, "ops", "lowerings"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert path.resolve() in shipped, f"{named(path)} is in no package-data pattern"


def test_the_version_stands_in_both_places():
    assert PYPROJECT["project"]["version"] == int8moe_compile.__version__
    assert PYPROJECT["project"]["name"] == PACKAGE


def test_every_entry_point_leads_to_a_function():
    project = PYPROJECT["project"]
    backends = project["entry-points"]["torch_dynamo_backends"]
    assert list(project["scripts"]) == ["int8moe"] == list(backends)
    for target in (*project["scripts"].values(), *backends.values()):
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_triton_has_no_version_of_its_own():
    dependencies = PYPROJECT["project"]["dependencies"]
    triton = [line for line in dependencies if line.startswith("triton")]
    assert len(triton) == 1
    assert re.fullmatch(r"triton\s*;\s*platform_system == \"Linux\"", triton[0])
    assert "torch>=2.11" in dependencies


@pytest.mark.parametrize("path", sources(".py", ".jinja", ".sh"), ids=named)
def test_a_file_is_under_400_lines(path: Path):
    assert len(path.read_text().splitlines()) < 400


@pytest.mark.parametrize("path", sources(".py"), ids=named)
def test_a_file_says_its_job_and_its_functions_are_short(path: Path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the first line of the docstring says the file's one job"
    for function, lines, is_kernel in functions(tree):
        limit = 120 if is_kernel else 60
        assert lines <= limit, f"{function} has {lines} lines"


def functions(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """List name, lines and whether it is a Triton kernel of every function in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_kernel = any("jit" in decorator for decorator in decorators)
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1, is_kernel


@pytest.mark.slow
def test_a_wheel_holds_the_whole_package(tmp_path: Path):
    pytest.importorskip("setuptools")
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), "."], cwd=checkout, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for parent, folders, names in os.walk(ROOT / PACKAGE, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            assert named(Path(parent, name)) in held
