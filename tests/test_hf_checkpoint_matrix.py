"""Format by scheme by family: loads bit for bit, one operator a layer, close to its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import (
    CHANNEL,
    DYNAMIC_TENSOR,
    GATE_UP_DOWN,
    STATIC_TENSOR,
    TENSOR,
    TOKEN,
    W1_W3_W2,
    Written,
    check,
    compressed,
    load,
    write,
)
from hf_formats import gptq, quark, written_as_gptq, written_as_torchao
from hf_models import token_ids
from passes_support import run
from torch import nn

from int8moe_compile.checkpoint_pack import pack_codes
from int8moe_compile.hf import find_experts

ENTRIES = {
    "w8a8": (CHANNEL, TOKEN),
    "w8a8_tensor": (TENSOR, DYNAMIC_TENSOR),
    "w8a8_static": (CHANNEL, STATIC_TENSOR),
    "w8a16": (CHANNEL, None),
}
# One scale for all rows has to reach the largest value that the gate makes, some twenty times the
# root mean square: a step of amax/127 then costs 20 / 127 / sqrt(12), 0.045, of the second product
# alone.
BOUNDS = {"w8a8": 0.05, "w8a16": 0.05, "w8a8_tensor": 0.1, "w8a8_static": 0.1}
BLOCKS = {
    "mixtral": "block_sparse_moe.experts",
    "granitemoe": "block_sparse_moe.experts",
}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe")
FORMATS = {
    "compressed-tensors": tuple(ENTRIES),
    "quark": tuple(ENTRIES),
    "torchao": ("w8a8", "w8a8_tensor", "w8a16"),
    "gptq": ("w8a16",),
}
# Cheap enough, beside what other tests cover, for every run.
QUICK = {
    ("qwen3_moe", "w8a8_static", "compressed-tensors"),
    ("qwen3_moe", "w8a16", "compressed-tensors"),
    ("mixtral", "w8a8", "compressed-tensors"),
    ("gpt_oss", "w8a8", "torchao"),
}
CASES = [
    pytest.param(
        *(family, scheme, format),
        marks=() if (family, scheme, format) in QUICK else pytest.mark.slow,
    )
    for family in FAMILIES
    for format, schemes in FORMATS.items()
    for scheme in schemes
]


def static(word: str) -> torch.Tensor:
    """Return a static scale that fits what enters a projection."""
    return torch.tensor([0.5 if word in ("down_proj", "w2") else 0.035])


def written_as(directory: Path, family: str, scheme: str, format: str, **options: Any) -> Written:
    """Write a checkpoint of a family in its own names."""
    weights, inputs = ENTRIES[scheme]
    if format == "torchao":
        return written_as_torchao(directory, family, scheme)
    names: dict[str, Any] = {
        "block": "model.layers.{layer}." + BLOCKS.get(family, "mlp.experts"),
        "spelling": W1_W3_W2 if family == "mixtral" else GATE_UP_DOWN,
    }
    if format == "gptq":
        return written_as_gptq(directory, gptq(), family=family, **names)
    ignore = ("re:.*self_attn.*", "lm_head", "re:.*gate$", "re:.*router.*", "re:.*shared.*")
    packed = inputs is None and format == "compressed-tensors"
    word = "pack-quantized" if packed else "int-quantized"
    config = compressed(weights, inputs, ignore=ignore, format=word)
    written = write(
        directory,
        family,
        config=config if format == "compressed-tensors" else quark(weights, inputs),
        per_tensor=weights is TENSOR,
        input_scale=static if inputs is STATIC_TENSOR else None,
        **names,
        **options,
    )
    for name in [name for name in written.tensors if packed and name.endswith("weight_scale")]:
        stem = name.removesuffix("_scale")
        codes = written.tensors.pop(stem)
        written.tensors[f"{stem}_packed"] = pack_codes(codes)
        written.tensors[f"{stem}_shape"] = torch.tensor(codes.shape)
    return written


def errors(model: nn.Module) -> list[float]:
    """Compare each module's operator with its dequantised weights: error over spread."""
    found = []
    hidden = model.config.hidden_size
    for _, module in find_experts(model):
        experts, top_k = module.num_experts, model.config.num_experts_per_tok
        states, ids, weights = routed(64, experts=experts, hidden=hidden, top_k=top_k)
        with torch.inference_mode():
            model.set_experts_implementation("grouped_mm")
            wanted = module(states, ids, weights).float()
            model.set_experts_implementation("int8moe")
            got = module(states, ids, weights).float()
        found.append(float((got - wanted).norm() / wanted.norm()))
    return found


def logits_error(model: Any) -> float:
    """Compare logits with those of the dequantised weights behind the first layer: error by norm.

    Every token goes to the same experts there; behind the second one a rounding may send it to
    others.
    """
    model.model.layers = model.model.layers[:1]
    with torch.inference_mode():
        model.set_experts_implementation("grouped_mm")
        wanted = model(token_ids(), use_cache=False).logits.float()
        model.set_experts_implementation("int8moe")
        got = model(token_ids(), use_cache=False).logits.float()
    return float((got - wanted).norm() / wanted.norm())


def routed(
    tokens: int, *, experts: int, hidden: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw what a router would give an experts module."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).bfloat16()
    scores = torch.randn(tokens, experts, generator=generator).softmax(-1)
    weights, ids = scores.topk(top_k, dim=-1)
    return states, ids, (weights / weights.sum(-1, keepdim=True)).bfloat16()


@pytest.mark.parametrize(("family", "scheme", "format"), CASES)
def test_a_checkpoint_runs_as_one_operator_a_layer(
    tmp_path: Path, family: str, scheme: str, format: str
):
    written = written_as(tmp_path, family, scheme, format)
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    assert max(errors(loaded)) < BOUNDS[scheme]
    captured = run(loaded, token_ids(), use_cache=False)
    assert len(captured.calls()) == len(list(find_experts(loaded))) == 2
    assert torch.isfinite(captured.result.logits).all()
    assert logits_error(loaded) < BOUNDS[scheme]


def test_sixty_four_experts_of_odd_sizes(tmp_path: Path):
    sizes = {"num_experts": 64, "num_experts_per_tok": 6, "hidden_size": 128}
    written = written_as(
        tmp_path, "qwen3_moe", "w8a8", "compressed-tensors", moe_intermediate_size=88, **sizes
    )
    loaded = load(written.save(tmp_path / "int8"), written)
    check(loaded, written)
    assert max(errors(loaded)) < 0.05
    assert len(run(loaded, token_ids(), use_cache=False).calls()) == 2
