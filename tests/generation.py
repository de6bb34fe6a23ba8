"""Run generate() of a model, eager or compiled as transformers does, and count the graphs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from passes_support import EXPERTS, MARKER
from torch import Tensor, fx, nn
from transformers import CompileConfig

from int8moe_compile.passes.capture import capture_backend
from int8moe_compile.passes.joint import ExpertsPass


@dataclass
class Compiler:
    """A backend that stops behind the graph pass, and the graphs that it was given."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    experts_pass: ExpertsPass = field(default_factory=ExpertsPass)

    @functools.cached_property
    def backend(self) -> Any:
        return capture_backend(self.experts_pass, self.graphs.append)

    @functools.cached_property
    def config(self) -> CompileConfig:
        """What makes generate compile its decoding steps, on a CPU, too; another one recompiles."""
        config = CompileConfig(backend=self.backend, mode=None, fullgraph=True)
        config._compile_all_devices = True
        return config

    def assert_rewritten(self, layers: int) -> None:
        for graph in self.graphs:
            targets = [node.target for node in graph.graph.nodes]
            assert targets.count(EXPERTS) == layers
            assert MARKER not in targets


def generate(model: nn.Module, ids: Tensor, new_tokens: int = 8, **options: Any) -> Tensor:
    """Continue token ids, greedily unless the options say otherwise; zeros on the left pad."""
    given = {
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": "compile_config" not in options,
        **options,
    }
    torch.manual_seed(0)
    with torch.inference_mode():
        return model.generate(ids, **given)


class _OffCpu:
    """The model as its own code sees it where it is on no CPU."""

    device = torch.device("cuda")

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def decode_as_off_cpu(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let generate treat the decoding steps as it does on accelerators: grouped to batched_mm."""

    def optimised() -> AbstractContextManager[None]:
        return type(model)._optimize_model_for_decode(_OffCpu(model))

    monkeypatch.setattr(model, "_optimize_model_for_decode", optimised)
