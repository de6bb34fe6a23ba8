"""A humming-kernels that computes in plain PyTorch what the real one documents, and checks more.

Weights are laid out as on sm_90: 16 bytes of the depth at a time, [E, K/16, N/64, 64, 16].
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from int8moe_compile.lowerings import humming_weights
from int8moe_compile.ops import reference
from int8moe_compile.ops.quantize import row_scale


@dataclass(frozen=True)
class LayerConfig:
    """Take what this package says about a product."""

    shape_n: int
    shape_k: int
    num_experts: int
    a_dtype: str
    b_dtype: str
    c_dtype: str
    as_dtype: str
    weight_scale_type: str
    pad_shape_n: int = 0
    pad_shape_k: int = 0

    @property
    def outputs(self) -> int:
        return self.shape_n - self.pad_shape_n

    @property
    def columns(self) -> int:
        return self.shape_k - self.pad_shape_k

    def to_str(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Humming:
    """Hold what was asked of the fake: conversions, compiled products, launches."""

    block_m: int = 16
    conversions: int = 0
    launches: int = 0
    compiled: list[tuple[LayerConfig, Any, Any]] = field(default_factory=list)

    def transform(self, config: LayerConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        shape = (config.num_experts, config.outputs, config.columns // 4)
        assert weight.dtype == torch.int32 and weight.shape == shape and weight.is_contiguous()
        assert scale.dtype == torch.float32 and scale.shape == shape[:1]
        self.conversions += 1
        offset = weight.view(torch.uint8)
        pad = (0, config.pad_shape_k, 0, config.pad_shape_n)
        signed = (torch.nn.functional.pad(offset, pad).short() - 128).to(torch.int8)
        experts, rows, columns = signed.shape
        flat = signed.reshape(experts, rows // 64, 64, columns // 16, 16).permute(0, 3, 1, 2, 4)
        packed = flat.contiguous().reshape(experts, rows, columns).view(torch.int32)
        return {"weight": packed, "weight_scale": scale}

    def heuristics(self, config: LayerConfig, **options: Any) -> dict[str, Any]:
        assert options["gemm_type"] == "indexed" and options["shape_m"] > 0
        # The second product has tiles of its own.
        rows = self.block_m if config.columns > config.outputs // 2 else self.block_m * 2
        return {"block_shape": (rows, 128, 128)}

    def prepare(self, config: str, compute: str, tuning: list[Any], *, device: int) -> Tensor:
        self.compiled.append((LayerConfig(**json.loads(config)), json.loads(compute), tuning))
        return torch.tensor([0, 1 << 30, len(self.compiled) - 1, 0])

    def launch(
        self,
        *,
        configs: Tensor,
        inputs: Tensor,
        input_scale: Tensor,
        outputs: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        sorted_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_padded: Tensor,
        top_k: int,
    ) -> None:
        self.launches += 1
        config, _, tuning = self.compiled[int(configs[2])]
        block_m = tuning[0][2]["block_shape"][0]
        rows = inputs.shape[0]
        assert inputs.dtype == torch.int8 and inputs.shape[1] == config.columns
        assert inputs.is_contiguous() and outputs.is_contiguous()
        assert input_scale.dtype == torch.float32 and input_scale.shape == (rows, 1)
        assert outputs.shape == (rows * top_k, config.outputs)
        assert str(outputs.dtype) == f"torch.{config.c_dtype}"
        assert weight_scale.dtype == torch.float32
        assert weight_scale.shape == (config.num_experts,)
        lists = (sorted_ids, expert_ids, num_tokens_padded)
        assert all(each.dtype == torch.int32 for each in lists)
        outputs.fill_(float("nan"))
        signed = self.signed(weight, config)
        tiles, rest = divmod(int(num_tokens_padded), block_m)
        assert rest == 0 and tiles <= expert_ids.numel()
        for tile in range(tiles):
            expert = int(expert_ids[tile])
            ids = sorted_ids[tile * block_m : (tile + 1) * block_m].long()
            assert bool(((ids >= 0) & (ids <= rows * top_k)).all())
            ids = ids[ids < rows * top_k]
            sums = (inputs[ids // top_k].double() @ signed[expert].double().t()).float()
            scales = input_scale[ids // top_k] * weight_scale[expert]
            outputs[ids] = (sums * scales).to(outputs.dtype)

    def signed(self, weight: Tensor, config: LayerConfig) -> Tensor:
        """Return the codes [E,N,K] of a converted weight."""
        rows, columns = config.shape_n, config.shape_k
        flat = weight.view(torch.int8).reshape(-1, columns // 16, rows // 64, 64, 16)
        codes = flat.permute(0, 2, 3, 1, 4).reshape(-1, rows, columns)
        return codes[:, : config.outputs, : config.columns]


@contextmanager
def installed(block_m: int = 16) -> Iterator[Humming]:
    """Let the fake be importable as humming."""
    fake = Humming(block_m)
    contents: dict[str, dict[str, Any]] = {
        "humming": {},
        "humming.ops": {"launch_kernel": fake.launch},
        "humming.config": {"LayerConfig": LayerConfig, "ComputeConfig": _ComputeConfig},
        "humming.transform": {"transform_humming_tensors": fake.transform},
        "humming.tune": {"get_heuristics_config": fake.heuristics},
        "humming.kernel": {},
        "humming.kernel.humming": {
            "HummingKernel": types.SimpleNamespace(prepare_kernels=fake.prepare)
        },
    }
    modules = {}
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(values)
        modules[name] = module
    modules["humming"].ops = modules["humming.ops"]  # type: ignore[attr-defined]
    others = {
        name: module for name, module in sys.modules.items() if name.split(".")[0] == "humming"
    }
    # Not mock.patch.dict, which would forget whatever is imported meanwhile.
    for name in others:
        del sys.modules[name]
    sys.modules.update(modules)
    humming_weights.product_of.cache_clear()
    try:
        yield fake
    finally:
        humming_weights.product_of.cache_clear()
        for name in modules:
            del sys.modules[name]
        sys.modules.update(others)


class _ComputeConfig:
    def __init__(self, **options: Any) -> None:
        self.options = options

    def to_str(self) -> str:
        return json.dumps(self.options)


@contextmanager
def meaning() -> Iterator[None]:
    """Let the reference round where humming does: each product before the channels' scales."""

    outputs = [torch.bfloat16]
    plain = reference.ExpertsArguments

    def arguments(*args: Any, **kwargs: Any) -> Any:
        call = plain(*args, **kwargs)
        outputs[0] = call.result_dtype
        return call

    def dequantized(
        product: Tensor, row_scales: Tensor | None, weight: Tensor, scale: Tensor, expert: int
    ) -> Tensor:
        assert row_scales is not None
        scale = scale.reshape(scale.shape[:2])
        power, rest = humming_weights.split_scale(row_scale(scale, weight.shape[1]))
        rounded = (product * (row_scales.to(product.dtype) * power[expert])).to(outputs[0])
        return rounded.to(product.dtype) * rest[expert].to(product.dtype)

    with (
        mock.patch.object(reference, "_dequantized", dequantized),
        mock.patch.object(reference, "ExpertsArguments", arguments),
    ):
        yield
