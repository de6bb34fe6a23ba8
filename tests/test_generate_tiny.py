"""generate() with INT8 experts: eager, compiled, padded, sampled, and few compilations."""

from __future__ import annotations

import hf_models
import pytest
import torch
from generation import Compiler, decode_as_off_cpu, generate
from torch import Tensor, nn

from int8moe_compile.hf import find_experts
from int8moe_compile.quantization import quantize_

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20}
LENGTHS = (5, 1, 2, 50, 200, 17)


def quantised(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> nn.Module:
    return quantize_(hf_models.build_model(family, dtype=dtype))


def padded_batch() -> Tensor:
    """Return two prompts of 9 and 5 tokens, the shorter one padded on the left."""
    ids = hf_models.token_ids(2, 9)
    ids[1, :4] = 0
    return ids


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_eager_generation_uses_the_operator_and_is_reproducible() -> None:
    model = quantised(dtype=torch.bfloat16)
    assert model.config._experts_implementation == "int8moe"
    ids = hf_models.token_ids(2, 9)
    greedy = generate(model, ids)
    assert greedy.shape == (2, 17)
    assert torch.equal(generate(model, ids), greedy)
    assert torch.equal(generate(model, ids, cache_implementation=None), greedy)
    assert not torch.equal(generate(model, ids, **SAMPLING), greedy)
    assert torch.equal(generate(model, ids, **SAMPLING), generate(model, ids, **SAMPLING))
    assert model.config._experts_implementation == "int8moe"


def test_left_padding_does_not_change_what_a_prompt_continues_with() -> None:
    model = quantised()
    batch = padded_batch()
    together = generate(model, batch)
    alone = generate(model, batch[1:, 4:])
    assert torch.equal(together[1, 4:], alone[0])
    assert torch.equal(together[0], generate(model, batch[:1])[0])


def test_compiled_decoding_gives_the_same_tokens() -> None:
    # One compilation for greedy, sampled and padded calls of one shape.
    model = quantised()
    compiler = Compiler()
    plain, padded = hf_models.token_ids(2, 9), padded_batch()
    for ids, options in ((plain, {}), (padded, {}), (padded, SAMPLING)):
        wanted = generate(model, ids, **options)
        got = generate(model, ids, compile_config=compiler.config, **options)
        assert torch.equal(got, wanted)
    assert len(compiler.graphs) == 1
    compiler.assert_rewritten(hf_models.LAYERS)


def test_switch_to_batched_mm_in_decoding_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised(dtype=torch.bfloat16)
    ids = hf_models.token_ids(2, 9)
    wanted = generate(model, ids)
    model.set_experts_implementation("grouped_mm")
    decode_as_off_cpu(model, monkeypatch)
    seen = []

    def see(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append((module.config._experts_implementation, len(given[0])))

    first = next(module for _, module in find_experts(model))
    handle = first.register_forward_pre_hook(see)
    generate(model, ids, 3)
    handle.remove()
    assert seen == [("grouped_mm", 18), ("batched_mm", 2), ("batched_mm", 2)]
    assert model.config._experts_implementation == "grouped_mm"

    compiler = Compiler()
    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend=compiler.backend))
    assert torch.equal(generate(model, ids), wanted)
    assert len(compiler.graphs) == 2, "one of the prompt, one of every step after it"
    compiler.assert_rewritten(hf_models.LAYERS)


def test_int8moe_keeps_its_name_in_decoding_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised(dtype=torch.bfloat16)
    decode_as_off_cpu(model, monkeypatch)
    seen = set()
    first = next(module for _, module in find_experts(model))
    first.register_forward_pre_hook(
        lambda module, given: seen.add(module.config._experts_implementation)
    )
    generate(model, hf_models.token_ids(2, 9), 3)
    assert seen == {"int8moe"}


@pytest.mark.slow
def test_two_compilations_for_every_prompt_length() -> None:
    # transformers compiles the decoding steps: static for the first length of the cache, then
    # for any.
    model = quantised()
    compiler = Compiler()
    for length in LENGTHS:
        ids = hf_models.token_ids(1, length)
        got = generate(model, ids, 4, compile_config=compiler.config)
        assert torch.equal(got, generate(model, ids, 4))
    print(f"prompt lengths {LENGTHS}: {len(compiler.graphs)} compilations")
    assert len(compiler.graphs) <= 2
    compiler.assert_rewritten(hf_models.LAYERS)


@pytest.mark.slow
def test_three_compilations_with_the_prompt_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised()
    wanted = {n: generate(model, hf_models.token_ids(1, n), 4) for n in LENGTHS}
    compiler = Compiler()
    compiled = torch.compile(model.forward, backend=compiler.backend, dynamic=True)
    monkeypatch.setattr(model, "forward", compiled)
    for length, tokens in wanted.items():
        assert torch.equal(generate(model, hf_models.token_ids(1, length), 4), tokens)
    print(f"prompt lengths {LENGTHS}: {len(compiler.graphs)} compilations")
    assert len(compiler.graphs) <= 3
    compiler.assert_rewritten(hf_models.LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "mixtral", "deepseek_v3"])
def test_other_families_generate_compiled(family: str) -> None:
    model = quantised(family)
    compiler = Compiler()
    ids = padded_batch()
    wanted = generate(model, ids)
    assert torch.equal(generate(model, ids, compile_config=compiler.config), wanted)
    compiler.assert_rewritten(hf_models.LAYERS)
    # The float model's own: the sliding cache of gpt_oss counts in Python and recompiles once.
    plain = Compiler()
    torch._dynamo.reset()
    generate(hf_models.build_model(family, dtype=torch.float32), ids, compile_config=plain.config)
    print(f"{family}: {len(compiler.graphs)} compilations, {len(plain.graphs)} in float")
    assert len(compiler.graphs) == len(plain.graphs) <= 2
