"""INT8 experts beside autocast, gradients, freezing, graph breaks, offloading and adapters."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from passes_support import EXPERTS, MARKER, run
from torch import Tensor, fx, nn

import int8moe_compile
from int8moe_compile.hf import find_experts
from int8moe_compile.passes import notices
from int8moe_compile.quantization import quantize_


def quantised(**options: Any) -> nn.Module:
    return quantize_(hf_models.build_model("qwen3_moe", **options))


def eager(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_neither_rewrite_nor_dtype(dtype: torch.dtype) -> None:
    model, ids = quantised(dtype=dtype), hf_models.token_ids()
    with torch.autocast("cpu", torch.bfloat16):
        plain = eager(hf_models.build_model("qwen3_moe", dtype=dtype), ids)
        wanted = eager(model, ids)
        captured = run(model, ids, use_cache=False)
    result = captured.result.logits
    assert len(captured.calls(EXPERTS)) == hf_models.LAYERS and not captured.calls(MARKER)
    assert result.dtype == wanted.dtype == plain.dtype
    assert hf_models.relative_error(result, wanted) < 2e-2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_experts_are_rewritten_without_gradients(mode: Any) -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class("MixtralExperts")))
    experts.config._experts_implementation = "batched_mm"
    inputs = hf_models.routed()
    with mode():
        captured = run(experts, *inputs)
    assert len(captured.calls(EXPERTS)) == 1


def test_training_graph_is_left_alone_with_a_message() -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class("MixtralExperts")))
    hidden_states, ids, weights = hf_models.routed()
    hidden_states.requires_grad_()
    notices.forget()
    with pytest.warns(UserWarning, match="leaves a graph alone that computes gradients"):
        captured = run(experts, hidden_states, ids, weights, grad=True)
    assert captured.reasons == ["the graph computes gradients"]


def test_layers_compiled_one_by_one_and_graph_breaks() -> None:
    model, ids = quantised(), hf_models.token_ids()
    wanted = eager(model, ids)

    def breaking(module: nn.Module, given: Any) -> None:
        torch._dynamo.graph_break()

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(breaking)
    captured = run(model, ids, use_cache=False, fullgraph=False)
    assert len(captured.graphs) > 1
    assert len(captured.calls(EXPERTS)) == hf_models.LAYERS and not captured.calls(MARKER)
    assert hf_models.relative_error(captured.result.logits, wanted) < 2e-2


def test_one_layer_alone() -> None:
    model = quantised()
    block = model.model.layers[1].mlp
    hidden_states = torch.randn(1, 7, hf_models.HIDDEN, dtype=torch.bfloat16)
    captured = run(block, hidden_states)
    assert len(captured.calls(EXPERTS)) == 1
    assert [outcome.name for outcome in captured.outcomes] == ["experts"]
    with torch.no_grad():
        assert hf_models.relative_error(captured.result, block(hidden_states)) < 2e-2


def test_cpu_offload_is_accepted(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = quantised(), hf_models.token_ids()
    wanted = eager(model, ids)
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    devices |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(
        model, device_map=devices, main_device="cpu", offload_dir=str(tmp_path)
    )
    on_meta = [experts.down_proj.device.type for _, experts in find_experts(model)]
    assert on_meta == ["cpu", "meta"], "the second layer's experts are on disk"
    assert torch.equal(eager(model, ids), wanted)


def test_lora_on_attention() -> None:
    peft = pytest.importorskip("peft")
    model, ids = quantised(), hf_models.token_ids()
    wanted = eager(model, ids)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    captured = run(adapted, input_ids=ids, use_cache=False)
    assert len(captured.calls(EXPERTS)) == hf_models.LAYERS
    with adapted.disable_adapter():
        assert torch.equal(eager(adapted, ids), wanted)
    assert not torch.equal(eager(adapted, ids), wanted)
    # A step trains the adapters, through dequantised experts.
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_B" in n)


@pytest.mark.slow
def test_freezing_keeps_int8_constants() -> None:
    experts = quantize_(hf_models.build_experts(hf_models.experts_class("MixtralExperts")))
    inputs = hf_models.routed()
    wanted = experts(*inputs)
    constants: dict[str, Tensor] = {}

    def collect(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "get_attr":
                constants[node.target] = getattr(graph.owning_module, node.target)

    settings = {"freezing": True, "post_grad_custom_post_pass": collect}
    with torch.no_grad(), torch._inductor.config.patch(settings), int8moe_compile.enabled():
        result = torch.compile(experts, fullgraph=True)(*inputs)
    assert torch.equal(result, wanted)
    held = sum(tensor.nbytes for tensor in (*experts.parameters(), *experts.buffers()))
    assert constants
    assert sum(tensor.nbytes for tensor in constants.values()) <= 1.1 * held


@pytest.mark.slow
def test_compiling_an_offloaded_model_does_no_harm(tmp_path: Any) -> None:
    # accelerate's hooks break the graph around every module, so that the experts run eagerly.
    accelerate = pytest.importorskip("accelerate")
    model, ids = quantised(), hf_models.token_ids()
    wanted = eager(model, ids)
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    devices |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(
        model, device_map=devices, main_device="cpu", offload_dir=str(tmp_path)
    )
    captured = run(model, ids, use_cache=False, fullgraph=False)
    assert not captured.calls(MARKER)
    assert hf_models.relative_error(captured.result.logits, wanted) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("compiles", [False, True])
def test_device_map_over_two_devices(compiles: bool) -> None:
    # Two GPUs where there are, otherwise the second layer's weights wait on the CPU. Compiled,
    # accelerate's hooks recompile up to Dynamo's limit, as they do around the float model.
    accelerate = pytest.importorskip("accelerate")
    # Seed 2: no token's experts tie, even if its embedding moves by 1e-4.
    model, ids = quantised(dtype=torch.float32).cuda(), hf_models.token_ids(seed=2).cuda()
    wanted = eager(model, ids)
    second: Any = 1 if torch.cuda.device_count() > 1 else "cpu"
    devices = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": second}
    devices |= {"model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
    accelerate.dispatch_model(model, device_map=devices, main_device=0)
    with torch.no_grad(), int8moe_compile.enabled():
        called: Any = torch.compile(model) if compiles else model
        result = called(ids, use_cache=False).logits
    assert result.device == wanted.device
    # Roundings in fp32 differ by 1e-6, but may move a code by one. Embeddings that differ by 1e-5
    # move the logits by 3e-3 at most, a token that goes to another expert by 0.15 (measured).
    assert hf_models.relative_error(result, wanted) < 5e-3
