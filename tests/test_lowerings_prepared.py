"""Eager calls that are repeated, without a GPU: what leads to them and what the driver is given."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import own_process
import pytest
import torch
from support import Problem, problem
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from int8moe_compile import compat_triton, registry
from int8moe_compile.ops import register
from int8moe_compile.ops.arguments import ExpertsArguments


def test_arguments_are_those_of_the_schema() -> None:
    from int8moe_compile.lowerings import prepared

    schema = torch.ops.int8moe.experts.default._schema
    given = inspect.signature(prepared.experts).parameters
    names = tuple(argument.name for argument in schema.arguments)
    assert names == tuple(given) == ExpertsArguments._fields
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    ours = {name: p.default for name, p in given.items() if p.default is not p.empty}
    assert defaults == ours == ExpertsArguments._field_defaults


def compiled_with(scratch: int) -> Any:
    """Return what Triton's compiler would: a kernel with so many bytes of scratch memory."""
    run = SimpleNamespace(
        global_scratch_size=scratch,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=True,
        launch="launch",
    )
    return SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 0))


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what makes an installed Triton of another release."""

    def pretend(name: str) -> None:
        compat_triton._known_release.cache_clear()
        monkeypatch.setattr(compat_triton.importlib.metadata, "version", lambda package: name)

    yield pretend
    compat_triton._known_release.cache_clear()


KERNEL = SimpleNamespace(pre_run_hooks=[])


def test_a_launcher_is_called_as_its_release_wants(release: Callable[[str], None]) -> None:
    """What comes behind programs and stream, as triton/backends/nvidia/driver.py reads it."""
    release("3.6.0")
    found = compat_triton.launcher_of(KERNEL, compiled_with(0))
    assert found is not None and found.function == "launch"
    assert found.before == (77, False, True, None, None, (4, 1, 0), None, None, None)
    # Memory of its own is what Triton's wrapper allocates.
    kernel = compiled_with(16)
    found = compat_triton.launcher_of(KERNEL, kernel)
    assert found is not None and found.function is kernel.run
    assert found.before == (77, (4, 1, 0), None, None, None)
    release("3.7.1")
    kernel = compiled_with(0)
    found = compat_triton.launcher_of(KERNEL, kernel)
    assert found is not None and found.function is kernel.run
    assert found.before == (77, (4, 1, 0), None, None, None)


def test_other_launchers_are_unknown(
    release: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    release("4.0.0")
    assert compat_triton.launcher_of(KERNEL, compiled_with(0)) is None
    release("3.6.0")
    assert compat_triton.launcher_of(KERNEL, compiled_with(0)) is not None
    assert compat_triton.launcher_of(KERNEL, None) is None
    hooked = SimpleNamespace(pre_run_hooks=[print])
    assert compat_triton.launcher_of(hooked, compiled_with(0)) is None
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert compat_triton.launcher_of(KERNEL, compiled_with(0)) is None


def test_who_watches_launches_is_seen() -> None:
    knobs = pytest.importorskip("triton.knobs")
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    is_watched = compat_triton.launch_watch(runtime)
    assert not is_watched()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = knobs.HookChain()
        setattr(runtime, name, chain)
        assert not is_watched()
        chain.add(print)
        assert is_watched()
        setattr(runtime, name, print)
        assert is_watched()
        setattr(runtime, name, None)


def test_metadata_are_compared() -> None:
    tensors = [torch.zeros(4, 6), torch.zeros(3, dtype=torch.int8)]
    is_same = compat_triton.metadata_check(tensors)
    assert is_same is not None
    assert is_same(*[tensor.clone() for tensor in tensors])
    wide = torch.zeros(4, 12)[:, ::2]
    others = (
        *(torch.zeros(6, 4).t(), wide, torch.zeros(4, 6).double(), torch.zeros(5, 6)),
        *(torch.nn.Parameter(tensors[0], requires_grad=False), torch.zeros(4, 6, device="meta")),
        torch.zeros(4, 6, requires_grad=True),
    )
    assert not any(is_same(other, tensors[1]) for other in others)
    assert not is_same(tensors[0], tensors[0])


class Through(TorchDispatchMode):
    """Pass every operator on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let CPU tensors go directly to what stands for the kernel of CUDA; returns those calls."""
    calls: list[int] = []
    keys, names = torch._C.DispatchKeySet, torch._C.DispatchKey
    both = keys(names.CPU) | keys(names.AutogradCPU)
    monkeypatch.setattr(register, "_PLAIN_KEYS", both.raw_repr())

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return register._experts_cpu(*args, **kwargs)

    kernel = registry.kernel
    monkeypatch.setattr(registry, "kernel", lambda name: call if name == "cuda" else kernel(name))
    return calls


def test_a_plain_call_skips_the_second_dispatch(direct: list[int]) -> None:
    case = problem(1)
    expected = case.reference()
    with torch.no_grad():
        assert torch.equal(case.run(), expected)
    assert torch.equal(case.run(), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.run(), expected)
    assert len(direct) == 3


def wanting(case: Problem) -> torch.Tensor:
    found = case.with_(hidden_states=case.hidden_states.clone().requires_grad_()).run()
    assert found.requires_grad
    return found.detach()


def in_a_mode(case: Problem) -> torch.Tensor:
    with torch.no_grad(), Through():
        return case.run()


def mapped(case: Problem) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        return case.with_(hidden_states=x).run()

    with torch.no_grad():
        return torch.func.functionalize(run)(case.hidden_states)


@pytest.mark.parametrize("through", [wanting, in_a_mode])
def test_what_lies_between_is_not_skipped(
    through: Callable[[Problem], torch.Tensor], direct: list[int]
) -> None:
    case = problem(1)
    assert torch.equal(through(case), case.reference())
    assert not direct


def test_transforms_and_fakes_get_their_turn(direct: list[int]) -> None:
    case = problem(1)
    assert torch.equal(mapped(case), case.reference())
    del direct[:]
    with FakeTensorMode() as mode, torch.no_grad():
        fakes = [mode.from_tensor(tensor) for tensor in case.args]
        assert torch.ops.int8moe.experts(*fakes).shape == case.hidden_states.shape
    assert not direct
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(
            case.hidden_states, torch.ones_like(case.hidden_states)
        )
        with pytest.raises(NotImplementedError, match="forward mode"):
            case.with_(hidden_states=dual).run()
    assert not direct


@pytest.mark.skipif(
    torch.cuda.is_available() or not (shutil.which("gcc") or shutil.which("clang")),
    reason="needs a C compiler, and no other driver",
)
def test_what_the_driver_is_asked_for() -> None:
    own_process.run("launched_at_once.py")


CODES = {"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [64, 128], "fp4_padded": False}


@pytest.mark.parametrize(
    "changes", [{"elem_size": 2}, {"fp4_padded": True}, {"block_size": None}, {"swizzle": None}]
)
def test_descriptors_of_something_else_than_bytes_are_unknown(changes: dict[str, Any]) -> None:
    found = compat_triton._map_of(CODES)
    assert found is not None and (found.swizzle, found.box) == (3, (64, 128))
    assert compat_triton._map_of(CODES | changes) is None
    assert compat_triton._map_of(None) is None


def test_more_descriptors_or_dimensions_than_a_plan_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from int8moe_compile.lowerings import direct, launches

    def plan(maps: int, rank: int = 2, padding: str = "zero") -> bytes | None:
        sizes = [32] * rank
        descriptor = SimpleNamespace(padding=padding, shape=sizes, strides=[1] * rank)
        described = launches.Described(launches.Place("argument", 0), descriptor)
        known = (compat_triton.Map(3, tuple(sizes)),) * maps
        binary = compat_triton.Binary(7, 128, 0, False, ("tensordesc<i8[32,32]>",) * maps, known)
        monkeypatch.setattr(compat_triton, "binary_of", lambda compiled: binary)
        launch = launches.Launch(None, None, 1, (described,) * maps)
        return direct.plan_of([launch], 1, 0, lambda place: 0)

    assert plan(direct.MOST_MAPS) is not None and plan(4, direct.MOST_RANK) is not None
    assert plan(direct.MOST_MAPS + 1) is None
    assert plan(1, direct.MOST_RANK + 1) is None
    assert plan(1, padding="nan") is None
