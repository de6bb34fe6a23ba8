"""Compile as Inductor does up to the joint graph, and run that graph as it is: no code is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .joint import ExpertsPass

Keep = Callable[[fx.GraphModule], None]


def capture_backend(experts_pass: ExpertsPass | None, keep: Keep | None = None) -> Any:
    """Return a backend for torch.compile that stops behind Inductor's joint passes.

    experts_pass None leaves the pass out that is installed. keep is given every graph.
    """

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(
            gm,
            list(example_inputs),
            inner_compile=_inner_compile(keep),
            config_patches={
                "joint_custom_pre_pass": experts_pass,
                # Nothing that is compiled here may be found, or be kept for later.
                "force_disable_caches": True,
            },
        )

    return backend


def _inner_compile(keep: Keep | None) -> Any:
    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        if keep is not None:
            keep(gm)

        def run(inputs: list[Any]) -> Any:
            given = list(inputs)
            inputs.clear()
            return fx.Interpreter(gm).run(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_graph
