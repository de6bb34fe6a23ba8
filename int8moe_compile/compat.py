"""Every version difference and every private name of torch that the package touches."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._functorch.utils import enable_single_level_autograd_function

# As in the extra "hf" of pyproject.toml.
LEAST_TRANSFORMERS: Final = (5, 10)


def below_autograd() -> AbstractContextManager[None]:
    """Return a context in which dispatch skips the autograd keys.

    Removable when torch.library offers an autograd registration that takes keyword-only
    tensors (register_autograd refuses them in 2.11-2.14).
    """
    return torch._C._AutoDispatchBelowAutograd()


def one_autograd_level() -> AbstractContextManager[None]:
    """Return a context in which an autograd.Function records on the level of torch.func in turn.

    Removable together with below_autograd.
    """
    return enable_single_level_autograd_function()


def in_forward_mode() -> bool:
    """Say whether forward-mode differentiation goes on, in whose course tensors carry tangents.

    Removable when torch has a public way to ask that costs no more (unpack_dual of every tensor
    takes as long as the rest of a call).
    """
    return torch.autograd.forward_ad._current_level >= 0


def sizes_equal(left: Any, right: Any) -> bool:
    """Compare two sizes while tracing or not, without branching on an unbacked size.

    Backed sizes compare with an ordinary guard. For unbacked ones the answer is False only when
    they differ whatever their values; otherwise the equality becomes a runtime check.
    Removable when torch offers this in one public call.
    """
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental import symbolic_shapes

    equal = left == right
    if symbolic_shapes.statically_known_true(equal):
        return True
    if symbolic_shapes.free_unbacked_symbols([left, right]):
        if symbolic_shapes.statically_known_true(left != right):
            return False
        torch._check(equal)
        return True
    return bool(equal)


def size_hint(size: Any) -> Any:
    """Return the number behind a traced size in the call being traced, for use in a message.

    An unbacked size has none and comes back as it is. Adds no guard.
    Removable when torch offers this in one public call.
    """
    node = getattr(size, "node", None)
    return node.hint if node is not None and node.has_hint() else size


def cpu_matmul_rounds_inputs() -> bool:
    """Say whether the user lets fp32 matrix products on CPU round their inputs (bf16, tf32).

    Removable when torch.get_float32_matmul_precision answers after the per-backend settings were
    used, too (it raises then in 2.13).
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    precision = getattr(matmul, "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")


def int8_dot_compiles(capability: tuple[int, int], is_rocm: bool) -> bool:
    """Say whether a Triton is there whose int8 ``tl.dot`` compiles for a device.

    Compiled offline for sm_75, a 64x64x64 int8 dot fails with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0
    alike ("arith.extf operand must be floating-point-like"; triton-lang/triton#9349, open), and
    for sm_80 it compiles with each. Put a version comparison here once a release has the fix.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    return is_rocm or capability >= (8, 0)


def literal(value: float) -> float:
    """Return a float that a graph carries as a guarded literal, also under ``dynamic=True``.

    There a float attribute of a module would become a 0-d graph input, which hides its value from
    graph passes. Removable when Dynamo has a public way to specialise one float.
    """
    if not torch.compiler.is_compiling():
        return value
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return float(guard_scalar(value))


def retrace_with_literals(tensor: Tensor) -> None:
    """Have Dynamo trace its frame again, with the floats of modules and globals as literals.

    tensor: any fake one of the graph. Raises the request by which torch itself restarts a trace
    whose floats it cannot carry as tensors; returns where no such float is left to ask for. What
    callers pass may change with every call and stays an input. Removable together with literal.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._guards import CompileContext, GuardSource
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    shape_env = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    if shape_env is None or CompileContext.current_compile_id() is None:
        return
    names = []
    for symbol, sources in shape_env.var_to_sources.items():
        if symbol_is_type(symbol, SymT.FLOAT) and not TensorifyState.should_specialize(symbol.name):
            holders = [source.guard_source for source in sources]
            if any(h is GuardSource.GLOBAL or h.is_unspecialized_nn_module() for h in holders):
                names.append(symbol.name)
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis(restart_reason="experts read floats that are inputs")


def choose_experts_implementation(config: Any, name: str) -> None:
    """Set the experts implementation of one transformers config and of none below it.

    The public setter of transformers 5.10-5.23 passes the name on to every sub-config, over what
    the user chose there. Removable when it can be told not to.
    """
    internal = "_experts_implementation_internal"
    setattr(config, internal if hasattr(config, internal) else "_experts_implementation", name)


def trace_functional(
    function: Callable[..., Any],
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> fx.GraphModule:
    """Trace a function of fake tensors to the graph that Inductor's joint passes would see.

    autocast: the dtype of the autocast context to trace it in, None for none. Functional,
    decomposed as Inductor does, outside whatever compilation is going on, and with
    torch.compiler.is_compiling() true, because model code branches on it. Removable when torch
    has a public way to trace a function as AOTAutograd does.
    """
    from torch._guards import tracing
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(function, remove="mutations")
    was_compiling = torch.compiler._is_compiling_flag
    with (
        tracing(None),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
        FakeTensorMode(),
    ):
        examples = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in inputs]
        torch.compiler._is_compiling_flag = True
        try:
            return make_fx(functional, decomposition_table=select_decomp_table())(*examples)
        finally:
            torch.compiler._is_compiling_flag = was_compiling


def computes_gradients(graph: fx.Graph) -> bool:
    """Say whether a joint graph has a backward part: AOTAutograd then adds inputs "tangents_N".

    Removable when a graph pass of Inductor is told so (2.13 tells post-grad passes only).
    """
    return any(str(n.target).startswith("tangents") for n in graph.find_nodes(op="placeholder"))


def compilation_error(message: str) -> Exception:
    """Return a ValueError that a compilation passes on to the user as it is.

    Dynamo and Inductor wrap every exception of a backend but ShortenTraceback. Removable when a
    backend can raise user errors.
    """
    from torch._dynamo.exc import ShortenTraceback

    class CompilationError(ShortenTraceback, ValueError):
        """Refuse what the user asked for while compiling."""

    return CompilationError(message, first_useful_frame=None)


def inductor_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Inductor's settings for torch.compile's mode and options, checked as it does.

    Removable when torch.compile resolves them for backends that wrap Inductor.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def inductor_cache_dir() -> str:
    """Return the directory that holds Inductor's compiled code, for the user's settings.

    Removable when torch names the directory in public.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def tracing_for_inductor() -> dict[str, Any] | None:
    """Return the settings of the torch.compile call that traces now, None unless for Inductor.

    Removable when a fake kernel can ask which backend it is traced for.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None  # nothing is being traced
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend.config if isinstance(backend, torch._TorchCompileInductorWrapper) else None


def add_to_inductor_key(name: str, content: str) -> None:
    """Make a text part of the key of everything that Inductor caches from now on.

    A lowering is not part of that key (torch 2.11-2.14), the table of functions that a user
    marked as cacheable is. Removable when Inductor hashes registered lowerings.
    """
    from torch._inductor import config

    marked = config.unsafe_marked_cacheable_functions
    config.unsafe_marked_cacheable_functions = {**marked, name: content}


def storage_identity(tensor: torch.Tensor) -> Any:
    """Return a value that equals another such value only if both tensors had the same storage.

    It keeps the storage's address from being used again, not its memory. Removable when torch has
    a public weak reference to a storage.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def loader_placement(job: Any) -> tuple[torch.device | str | None, torch.dtype | None] | None:
    """Return device and dtype that transformers' loader wants a waiting tensor in, None if unknown.

    Its waiting functions know both; calling one would map the file's pages into memory for good.
    Removable when transformers (5.10-5.23) hands a quantizer the placement of what it loads.
    """
    code, cells = getattr(job, "__code__", None), getattr(job, "__closure__", None)
    if code is None or cells is None:
        return None
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    is_known = {"device", "dtype"} <= set(held) and held.get("sharding_op") is None
    return (held["device"], held["dtype"]) if is_known else None


def require_transformers() -> None:
    """Raise ImportError with the way out where transformers is missing or too old; imports nothing.

    Removable when transformers becomes a dependency instead of an extra.
    """
    least = ".".join(map(str, LEAST_TRANSFORMERS))
    found = "none"
    if importlib.util.find_spec("transformers") is not None:
        try:
            found = importlib.metadata.version("transformers")
        except importlib.metadata.PackageNotFoundError:
            return  # a source tree without metadata: taken at its word
        release = re.match(r"(\d+)\.(\d+)", found)
        if release is None or tuple(map(int, release.groups())) >= LEAST_TRANSFORMERS:
            return
    raise ImportError(
        f"transformers: wanted {least} or newer, got {found}; "
        'pip install "int8moe_compile[hf]" installs it',
        name="transformers",
    )
