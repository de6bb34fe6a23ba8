"""A random sample of families on a GPU: rewritten, compiled by Inductor, and numerically right.

INT8MOE_FAMILY_SEED draws another sample.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import hf_models
import pytest
import tiny_families
import torch
from passes_support import EXPERTS, MARKER
from test_families_models import BOUNDS, is_one_graph, route
from torch import Tensor, fx, nn
from torch._inductor import compile_fx

import int8moe_compile
from int8moe_compile.hf import find_experts
from int8moe_compile.passes import installed
from int8moe_compile.quantization import quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

SEED = int(os.environ.get("INT8MOE_FAMILY_SEED", "5"))
SAMPLE = random.Random(SEED).sample(tiny_families.supported(), 10)


def fixed_routes(model: nn.Module, routes: list[Any]) -> None:
    """Give every layer the expert ids and weights that another model chose."""

    def fixing(ids: Tensor, weights: Tensor) -> Any:
        return lambda module, given: (given[0], ids, weights)

    modules = [module for _, module in find_experts(model)]
    for module, given in zip(modules, routes, strict=True):
        module.register_forward_pre_hook(fixing(*given))


def on_gpu(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Move the tensors of a call, embeddings in the model's dtype."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("cuda", dtype if value.is_floating_point() else value.dtype)

    return {name: moved(value) for name, value in given.items()}


class CountingBackend:
    """Inductor; ``ran`` counts the operators, ``left`` the markers, of the graphs that are run."""

    def __init__(self) -> None:
        self.ran = self.left = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        return compile_fx.compile_fx(gm, inputs, inner_compile=self._inner_compile)

    def _inner_compile(self, gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        targets = [node.target for node in gm.graph.nodes]
        compiled: Any = compile_fx.compile_fx_inner(gm, inputs, **options)

        def run(given: list[Any]) -> Any:
            self.ran += targets.count(EXPERTS)
            self.left += targets.count(MARKER)
            return compiled(given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", SAMPLE, ids=lambda family: family.class_name)
def test_sampled_family_compiled(family: tiny_families.Family, dtype: torch.dtype) -> None:
    twin = tiny_families.build(family, dtype=dtype)
    model = quantize_(copy.deepcopy(twin)).cuda()
    for _, experts in find_experts(twin):
        hf_models.rounded_to_int8(experts)
    inputs = on_gpu(tiny_families.inputs(family), dtype)
    routes: list[Any] = []
    hooks = route(twin.cuda(), routes, replay=False)
    with torch.no_grad():
        wanted = tiny_families.outputs(twin(**inputs))
    assert wanted.isfinite().all()
    for hook in hooks:
        hook.remove()
    fullgraph = is_one_graph(twin, inputs)
    fixed_routes(model, routes)
    with torch.no_grad():
        eager = tiny_families.outputs(model(**inputs))
    assert hf_models.relative_error(eager, wanted) < BOUNDS["w8a8"]

    torch._dynamo.reset()
    model.set_experts_implementation("grouped_mm")
    backend = CountingBackend()
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with torch.no_grad(), uncached, int8moe_compile.enabled():
        compiled: Any = torch.compile(model, backend=backend, fullgraph=fullgraph)
        got = tiny_families.outputs(compiled(**inputs))
        experts_pass = installed()
    assert experts_pass is not None
    outcomes = {(o.rewritten, o.backend, o.reason) for o in experts_pass.outcomes}
    assert outcomes == {(True, "triton", None)}
    # Each layer once, whether layers share a graph or not; none in eager mode.
    assert (backend.ran, backend.left) == (len(routes), 0)
    error = hf_models.relative_error(got, wanted)
    whole = "one graph" if fullgraph else "graph breaks"
    print(f"{family.class_name} {dtype}: {len(routes)} layers, {whole}, relative error {error:.4f}")
    assert error < BOUNDS["w8a8"]
