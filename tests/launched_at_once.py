"""What a repeated call hands to the driver, beside what Triton's own launchers hand to it.

Kernels are compiled for sm_90, the launchers are Triton's and ours, the driver is
noting_driver.c. Collected in a process of its own only: test_lowerings_prepared.py starts this.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import offline
import pytest
import torch
import triton
from support import Problem, problem, with_scheme
from triton.backends.nvidia import driver as nvidia

from int8moe_compile import compat_triton
from int8moe_compile.lowerings import direct, eager, eager_variants, prepared

COMPILER = shutil.which("gcc") or shutil.which("clang")
NUMBERS = ("grid", "threads", "shared", "stream", "function", "attributes", "attribute", "allowed")
WIDTHS = {"i1": 1, "u1": 1, "i32": 4, "u32": 4, "fp32": 4}
EARLY = 6


class Note(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in NUMBERS),
        ("parameters", ctypes.c_uint64 * 64),
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load the driver in place of CUDA's, and give Triton's launchers what they look for."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("noting_driver.c")
    for name in ("libcuda.so.1", "libcuda.so"):
        command = [str(COMPILER), "-O2", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, str(source), "-o", str(folder / name)], check=True)
    loaded = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    loaded.note_at.restype = ctypes.POINTER(Note)
    loaded.map_sum_at.restype = ctypes.c_uint64
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    triton.runtime.driver.set_active(SimpleNamespace(utils=nvidia.CudaUtils()))
    return loaded


def parameters_of(compiled: Any) -> list[str]:
    """Return the types of a kernel's parameters but for scratch memory, in the driver's order."""
    found = []
    for kind in compiled.src.signature.values():
        if kind.startswith("tensordesc"):
            # A map, then sizes and strides.
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            found += ["*map", *["i32"] * rank, *["i64"] * rank]
        elif kind != "constexpr":
            found.append(kind)
    return found


class Kernel:
    """Compile a kernel for sm_90 at a launch, and launch it as JITFunction does."""

    known: dict[Any, Any]

    def __init__(self, kernel: Any, known: dict[Any, Any]) -> None:
        self.kernel, self.known = kernel, known
        self.arg_names, self.fn = kernel.arg_names, kernel.fn

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **given: Any) -> Any:
            options = {name: given.pop(name) for name in offline.OPTIONS if name in given}
            bound = dict(zip(self.arg_names, args, strict=False), **given)
            values = [bound.get(each.name, each.default) for each in self.kernel.params]
            shown = [getattr(value, "dtype", value) for value in values]
            key = (self.kernel.__name__, str(options), str(shown))
            if key not in self.known:
                self.known[key] = self.loaded(offline.Launch(self.kernel, bound, options))
            compiled = self.known[key]
            head = (compiled.function, compiled.packed_metadata, None, None, None)
            compiled.run(*grid, 1, 1, 0, *head, *values)
            return compiled

        return launch

    def loaded(self, launch: offline.Launch) -> Any:
        compiled = offline.compile_launch(launch, "sm_90")
        compiled.function = 100 * (len(self.known) + 1) + len(parameters_of(compiled)) + 2
        compiled.module = 1
        compiled._run = nvidia.CudaLauncher(compiled.src, compiled.metadata)
        return compiled


@pytest.fixture(autouse=True)
def hopper(driver: Any) -> Iterator[dict[Any, Any]]:
    """Let eager calls on CPU tensors compile and launch for a Hopper."""
    known: dict[Any, Any] = {}
    prepared.forget()
    eager._layer_variant.cache_clear()
    patches = [
        mock.patch.object(eager, "facts_of", lambda device: offline.facts_of("sm_90")),
        mock.patch.object(eager_variants, "has_assembly", lambda device: True),
        mock.patch.object(eager_variants.EagerHost, "operate", offline._operate),
    ]
    modules = (offline.eager_kernels, offline.routing_kernels, offline.fused_kernels)
    modules += (offline.decode_kernels, offline.quantizing, offline.wgmma_kernels)
    modules += (offline.stream_kernels,)
    for module in modules:
        for name in dir(module):
            if name.endswith("_kernel"):
                patches.append(
                    mock.patch.object(module, name, Kernel(getattr(module, name), known))
                )
    for patch in patches:
        patch.start()
    yield known
    for patch in patches:
        patch.stop()
    prepared.forget()
    eager._layer_variant.cache_clear()


def noted(driver: Any, known: dict[Any, Any], case: Problem, **state: int) -> list[Any]:
    """Run a case; returns what the driver was asked for, addresses as what lies there."""
    driver.begin_notes(state.get("with_context", 1), state.get("error", 0))
    result = prepared.experts(*case.args, **case.options)
    values = {**vars(case), **case.options, "result": result}
    lying = {name: t for name, t in values.items() if isinstance(t, torch.Tensor)}
    types = {each.function: parameters_of(each) for each in known.values()}
    found = []
    for index in range(driver.count_notes()):
        note = driver.note_at(index).contents
        kinds = types[note.function]
        shown = [
            _shown(value, kind, lying) for value, kind in zip(note.parameters, kinds, strict=False)
        ]
        scratch = list(note.parameters[len(kinds) : len(kinds) + 2])
        found.append(([getattr(note, name) for name in NUMBERS], shown, scratch))
    sums = [driver.map_sum_at(index) for index in range(driver.count_maps())]
    assert len(sums) == sum(
        kinds.count("*map") for kinds in (types[head[4]] for head, _, _ in found)
    )
    # Beside the launch that comes after all of them.
    found[-1][2].extend(sums)
    return found


def _shown(value: int, kind: str, lying: dict[str, torch.Tensor]) -> Any:
    if not kind.startswith("*"):
        return value % 256 ** WIDTHS.get(kind, 8)
    for name, tensor in lying.items():
        if tensor.data_ptr() == value:
            return name
    return "a buffer" if value else "null"


def other(case: Problem) -> Problem:
    values = {**vars(case), **case.options}
    return case.with_(
        **{name: t.clone() for name, t in values.items() if isinstance(t, torch.Tensor)}
    )


def cases() -> dict[str, Problem]:
    sizes: dict[str, Any] = {"H": 256, "I": 128, "E": 8, "K": 2}
    biases = {"w13_bias": torch.randn(8, 256), "w2_bias": torch.randn(8, 256)}
    gate = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
    return {
        "one": problem(1, T=1, **sizes),
        "one static": with_scheme(problem(1, T=1, **sizes), "static"),
        "one float": with_scheme(problem(1, T=1, **sizes), "none"),
        "some": problem(1, T=64, **sizes, **gate, **biases),
        "some, mapped": problem(1, T=64, **sizes).with_(expert_map=torch.arange(8)),
        "strided": problem(1, T=3, **sizes).with_(topk_ids=torch.arange(6).reshape(2, 3).t()),
        "tensor": with_scheme(problem(1, T=64, **sizes), "tensor"),
        "tiles by descriptor": problem(1, T=900, **{**sizes, "dtype": torch.float16}),
        "asynchronous": problem(1, T=1200, H=512, I=384, E=8, K=2),
        "in one launch": problem(1, T=40, H=512, I=384, E=8, K=2),
        "in one launch, 64 rows": problem(1, T=240, H=512, I=384, E=24, K=4),
        "in one launch, 80 rows": problem(1, T=400, H=512, I=384, E=24, K=4),
        "in one launch, static": with_scheme(problem(1, T=40, H=512, I=384, E=8, K=2), "static"),
    }


# With zeros, launches are repeated by Triton's launchers.
APART = ("tensor",)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("at_once", [True, False])
def test_the_driver_is_asked_for_the_same(
    name: str, at_once: bool, driver: Any, hopper: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(direct, "launch_all", lambda: None)
    case = cases()[name]
    expected = noted(driver, hopper, case)
    ((_, repeat),) = next(iter(prepared._met.values())).kinds
    assert repeat is not None and hasattr(repeat, "kernels") == (at_once and name not in APART)
    monkeypatch.setattr(eager, "experts", None)
    again = other(case)
    for _ in range(2):
        assert noted(driver, hopper, again) == expected
    early = [head[6:] for head, _, _ in expected]
    following = [0, 0] if name == "tensor" else [EARLY, 1]
    assert early == [[0, 0]] + [following] * (len(expected) - 1) and len(expected) >= 2
    assert all(scratch[:2] == [0, 0] for _, _, scratch in expected)


def test_a_thread_without_a_context_gets_one(driver: Any, hopper: dict[Any, Any]) -> None:
    case = cases()["one"]
    expected = noted(driver, hopper, case)
    assert noted(driver, hopper, other(case), with_context=0) == expected


def test_an_error_of_the_driver_is_raised(driver: Any, hopper: dict[Any, Any]) -> None:
    case = cases()["one"]
    noted(driver, hopper, case)
    with pytest.raises(RuntimeError, match="CUDA error 700: noted"):
        noted(driver, hopper, case, error=700)
    assert len(noted(driver, hopper, case)) == 4


def test_kernels_outlive_whom_they_were_compiled_for(driver: Any, hopper: dict[Any, Any]) -> None:
    noted(driver, hopper, cases()["one"])
    ((_, repeat),) = next(iter(prepared._met.values())).kinds
    assert {id(each) for each in repeat.kernels} == {id(each) for each in hopper.values()}


def test_wrong_plans_are_refused(driver: Any) -> None:
    launch_all = direct.launch_all()
    assert launch_all is not None
    for wrong in (
        (bytearray(8), (), 0, 0, 0, 0),
        (bytes(8), [], 0, 0, 0, 0),
        (bytes(8), (), 0, 0, 0),
        (bytes(8), ("x",), 0, 0, 0, 0),
    ):
        with pytest.raises(TypeError):
            launch_all(*wrong)
    with pytest.raises(ValueError, match="16 addresses"):
        launch_all(bytes(8), tuple(range(17)), 0, 0, 0, 0)
    launch_all(bytes(8), (), 0, 0, 0, 0)


def test_what_a_plan_cannot_say_is_left_to_tritons_launchers(
    hopper: dict[Any, Any], driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted(driver, hopper, cases()["one"])
    compiled = next(iter(hopper.values()))
    assert compat_triton.binary_of(compiled) is not None
    for name, value in (("launch_cooperative_grid", True), ("global_scratch_size", 16)):
        with monkeypatch.context() as patch:
            patch.setattr(compiled.run, name, value)
            assert compat_triton.binary_of(compiled) is None
