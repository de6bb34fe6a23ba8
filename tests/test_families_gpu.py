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
from test_families_models import BOUNDS, route
from torch import Tensor, nn

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", SAMPLE, ids=lambda family: family.class_name)
def test_sampled_family_compiled(family: tiny_families.Family, dtype: torch.dtype) -> None:
    twin = tiny_families.build(family, dtype=dtype)
    model = quantize_(copy.deepcopy(twin)).cuda()
    for _, experts in find_experts(twin):
        hf_models.rounded_to_int8(experts)
    inputs = on_gpu(tiny_families.inputs(family), dtype)
    routes: list[Any] = []
    route(twin.cuda(), routes, replay=False)
    with torch.no_grad():
        wanted = tiny_families.outputs(twin(**inputs))
    assert wanted.isfinite().all()
    fixed_routes(model, routes)
    with torch.no_grad():
        eager = tiny_families.outputs(model(**inputs))
    assert hf_models.relative_error(eager, wanted) < BOUNDS["w8a8"]

    torch._dynamo.reset()
    model.set_experts_implementation("grouped_mm")
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with torch.no_grad(), uncached, int8moe_compile.enabled():
        got = tiny_families.outputs(torch.compile(model, fullgraph=True)(**inputs))
        experts_pass = installed()
    assert experts_pass is not None
    outcomes = [(o.rewritten, o.backend, o.reason) for o in experts_pass.outcomes]
    assert outcomes == [(True, "triton", None)] * len(routes)
    error = hf_models.relative_error(got, wanted)
    print(f"{family.class_name} {dtype}: {len(routes)} layers, relative error {error:.4f}")
    assert error < BOUNDS["w8a8"]
