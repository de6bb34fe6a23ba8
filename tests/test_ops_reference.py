"""Hold the reference and the CPU kernel to values worked out by hand.

Every expected number is exact in fp32 unless the test says otherwise; the comments derive it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Problem, probe, problem, with_scheme
from torch import Tensor

from int8moe_compile.ops import cpu, quantize
from int8moe_compile.ops.arguments import ExpertsArguments

Compute = Callable[[Problem], Tensor]
both = pytest.mark.parametrize("compute", [Problem.reference, Problem.run], ids=["meaning", "cpu"])


def codes(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


def single(x: Any, w13: Tensor, w2: Tensor, **options: Any) -> Problem:
    """Build fp32 tokens x that all meet one expert [N,H], [H,I] with scales and weights of 1."""
    rows = torch.as_tensor(x, dtype=torch.float32)
    return Problem(
        hidden_states=rows,
        w13=w13[None],
        w13_scale=torch.ones(1, w13.shape[0]),
        w2=w2[None],
        w2_scale=torch.ones(1, w2.shape[0]),
        topk_weights=torch.ones(rows.shape[0], 1),
        topk_ids=torch.zeros(rows.shape[0], 1, dtype=torch.int64),
        options=options,
    )


def gate_probe(pairs: Any, **options: Any) -> Problem:
    """Build the problem whose output's first column is the gated activation of (gate, up) rows."""
    return single(pairs, codes([1, 0], [0, 1]), codes([1], [0]), activation_quant="none", **options)


ONE = torch.tensor(1.0)


@both
def test_static_scales_not_gated(compute: Compute) -> None:
    # acc = [1*3 - 2*4, 1*5 + 2*6] = [-5, 17]; times [.5, .25]: [-2.5, 4.25]; relu: [0, 4.25]
    # /0.5 = [0, 8.5], half to even: [0, 8]; acc = [16, -8]; times .5*[.5, 2]: [4, -8]; times .5
    case = single([[1, 2]], codes([3, -4], [5, 6]), codes([1, 2], [3, -1])).with_(
        w13_scale=torch.tensor([[0.5, 0.25]]),
        w2_scale=torch.tensor([[0.5, 2.0]]),
        topk_weights=torch.tensor([[0.5]]),
        activation_quant="static",
        a13_scale=ONE,
        a2_scale=torch.tensor([0.5]),
        gated=False,
        activation="relu",
    )
    assert compute(case).tolist() == [[2.0, -4.0]]


@both
def test_token_scales_gated(compute: Compute) -> None:
    # row 0: s = 254/127 = 2, codes 127 and -63.5 -> -64; gate 254, up -128; product -32512
    # s = 32512/127 = 256, code -127; acc [-254, 381]; times 256*[1, .5]
    # row 1 is row 0 / 4: s = .5, gate 63.5, up -32: -2032; s = 16, code -127
    case = single([[254, -127], [63.5, -31.75]], codes([1, 0], [0, 1]), codes([2], [-3]))
    case = case.with_(w2_scale=torch.tensor([[1.0, 0.5]]), activation="relu")
    assert compute(case).tolist() == [[-65024.0, 48768.0], [-4064.0, 3048.0]]


@both
def test_tensor_scales_are_shared_by_all_rows(compute: Compute) -> None:
    # s = 1 for both rows: .25 -> 0, 2.75 -> 3; relu: [127, 0], [0, 3]; s = 1 again
    case = single([[127, 0.25], [0.25, 2.75]], codes([1, 0], [0, 1]), codes([1, 0], [0, 1]))
    case = case.with_(activation_quant="tensor", gated=False, activation="relu")
    assert compute(case).tolist() == [[127.0, 0.0], [0.0, 3.0]]
    # "token" sees .25 and 2.75 apart: s = 2.75/127, codes round(11.55) = 12 and 127
    alone = compute(case.with_(activation_quant="token"))[1]
    assert torch.allclose(alone, torch.tensor([12 * 2.75 / 127, 2.75]), rtol=1e-6, atol=0)


@both
def test_second_tensor_scale_sees_live_contributions_only(compute: Compute) -> None:
    # token 0 would reach 12700 in the intermediate; its id is out of range, so the scale is 1
    # for token 1: s1 = 100, codes [127, 0] and [0, 1] -> h = [0, 100] -> s = 100/127, code 127
    case = single([[12700, 0], [0, 100]], codes([1, 0], [0, 1]), codes([1, 0], [0, 1]))
    case = case.with_(
        topk_ids=torch.tensor([[1], [0]]),
        activation_quant="tensor",
        gated=False,
        activation="relu",
    )
    assert compute(case).tolist() == [[0.0, 0.0], [0.0, 100.0]]


# f(1) and f(-2): 1/(1+e^-1), Phi(1), its tanh form, max(., 0), its square
ACTIVATIONS = {
    "silu": (0.7310585786300049, -0.2384058440442351),
    "gelu": (0.8413447460685429, -0.04550026389635842),
    "gelu_tanh": (0.8411919906082768, -0.04540230591222725),
    "relu": (1.0, 0.0),
    "relu2": (1.0, 0.0),
}


@both
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(compute: Compute, activation: str) -> None:
    wanted = torch.tensor(ACTIVATIONS[activation])
    out = compute(gate_probe([[1, 1], [-2, 1], [3, 0], [1, -4]], activation=activation))[:, 0]
    assert torch.allclose(out[:2], wanted, rtol=1e-6, atol=1e-7)
    assert out[2] == 0
    assert torch.allclose(out[3], -4 * wanted[0], rtol=1e-6, atol=0)


@both
def test_relu2_squares(compute: Compute) -> None:
    assert compute(gate_probe([[3, 2]], activation="relu2"))[0, 0] == 18.0


@both
@pytest.mark.parametrize("alpha, wanted", [(1.0, 0.7310585786), (1.702, 0.8457957659)])
def test_not_gated_silu_takes_alpha(compute: Compute, alpha: float, wanted: float) -> None:
    case = single([[1.0]], codes([1]), codes([1]), activation_quant="none", gated=False)
    out = compute(case.with_(alpha=alpha))
    assert torch.allclose(out, torch.tensor(wanted), rtol=1e-6, atol=0)


@both
def test_clamped_gate(compute: Compute) -> None:
    # gpt-oss: g*sigmoid(1.702 g)*(u+1) after min(g, 7) and clamp(u, -7, 7), to four places
    case = gate_probe([[1, 0.5], [-2, 8], [9, -9]], alpha=1.702, beta=1.0, limit=7.0)
    wanted = torch.tensor([1.2687, -0.5147, -41.9997])
    assert torch.allclose(compute(case)[:, 0], wanted, rtol=0, atol=5e-5)


@both
def test_limit_bounds_the_gate_from_above_only(compute: Compute) -> None:
    # up 9 -> 2, gate 5 -> 2: 2*(2 + .5); but silu(-3) stays silu(-3)
    case = gate_probe([[-9, 1], [5, 9]], activation="relu", limit=2.0, beta=0.5)
    assert compute(case)[:, 0].tolist() == [0.0, 5.0]
    low = gate_probe([[-3, 1]], limit=2.0)
    assert torch.allclose(compute(low)[0, 0], torch.tensor(-0.1422776195), rtol=1e-6, atol=0)


@pytest.mark.parametrize("limit", [3.4028234e38, 1e39, 1e308, float("inf")])
@pytest.mark.parametrize(
    "compute",
    [
        Problem.reference,
        Problem.run,
        lambda case: cpu.experts(ExpertsArguments(*case.args, **case.options)),
    ],
    ids=["meaning", "cpu", "plain"],
)
def test_a_limit_beyond_fp32_is_none(compute: Compute, limit: float) -> None:
    case = gate_probe([[-9, 1], [5, 9]], activation="relu")
    assert compute(case.with_(limit=limit))[:, 0].tolist() == compute(case)[:, 0].tolist()


@both
def test_biases(compute: Compute) -> None:
    # expert 1: relu(1*2 + 3) = 5; 5*1 - 1 = 4; times .25. Expert 0 has another bias.
    case = single([[1.0]], codes([2]), codes([1]), activation_quant="none", gated=False)
    case = case.with_(
        w13=codes([[9]], [[2]]),
        w2=codes([[9]], [[1]]),
        w13_scale=torch.ones(2, 1),
        w2_scale=torch.ones(2, 1),
        topk_ids=torch.tensor([[1]], dtype=torch.int32),
        topk_weights=torch.tensor([[0.25]], dtype=torch.bfloat16),
        w13_bias=torch.tensor([[100.0], [3.0]], dtype=torch.float16),
        w2_bias=torch.tensor([[50.0], [-1.0]]),
        activation="relu",
    )
    assert compute(case).tolist() == [[1.0]]


@both
def test_router_weight_on_the_input(compute: Compute) -> None:
    # relu(g)*u is quadratic: weight .5 on the input gives .25, never .125 (applied twice)
    case = single([[4, 2]], codes([1, 0], [0, 1]), codes([1], [1]), activation_quant="none")
    case = case.with_(activation="relu", topk_weights=torch.tensor([[0.5]]))
    assert compute(case).tolist() == [[4.0, 4.0]]
    assert compute(case.with_(apply_router_weight_on_input=True)).tolist() == [[2.0, 2.0]]


@both
def test_router_weight_is_applied_in_fp32_before_quantisation(compute: Compute) -> None:
    # 64 * 1.197265625 = 76.625, with s = 1 code 77; as bf16 it would be 76.5 first, code 76
    case = single([[1.0]], codes([1]), codes([1]), activation_quant="static", gated=False)
    case = case.with_(
        hidden_states=torch.tensor([[64.0]], dtype=torch.bfloat16),
        topk_weights=torch.tensor([[1.197265625]]),
        a13_scale=ONE,
        a2_scale=ONE,
        activation="relu",
        apply_router_weight_on_input=True,
    )
    assert compute(case).tolist() == [[77.0]]


@both
def test_expert_map_and_ids_out_of_range(compute: Compute) -> None:
    # one column, expert e multiplies by 10^e; "none" makes the output the sum of those hit
    case = Problem(
        hidden_states=torch.ones(5, 1),
        w13=torch.ones(4, 1, 1, dtype=torch.int8),
        w13_scale=torch.tensor([[1.0], [10.0], [100.0], [1000.0]]),
        w2=torch.ones(4, 1, 1, dtype=torch.int8),
        w2_scale=torch.ones(4, 1),
        topk_weights=torch.ones(5, 2),
        topk_ids=torch.tensor([[0, 1], [2, 3], [1, -1], [-1, -1], [3, 4]]),
        options={"activation_quant": "none", "gated": False, "activation": "relu"},
    )
    assert compute(case).flatten().tolist() == [11.0, 1100.0, 10.0, 0.0, 1000.0]
    local = case.with_(
        w13=case.w13[:2],
        w13_scale=case.w13_scale[:2],
        w2=case.w2[:2],
        w2_scale=case.w2_scale[:2],
        expert_map=torch.tensor([0, -1, 1, -1], dtype=torch.int32),
    )
    assert compute(local).flatten().tolist() == [1.0, 10.0, 0.0, 0.0, 0.0]
    beyond = local.with_(expert_map=torch.tensor([2, 1 << 40, 1, -(1 << 40)]))
    assert compute(beyond).flatten().tolist() == [0.0, 10.0, 0.0, 0.0, 0.0]
    assert compute(local.with_(expert_map=torch.empty(0, dtype=torch.int64))).abs().sum() == 0


@both
def test_int8_hidden_states(compute: Compute) -> None:
    # token: row 0 is 100*.5 = 50 and -128*.5 < 0; row 1 is 6 and 2, s = 6/127, 2/s = 42.33 -> 42,
    # 42*6/127 = 1.98425, in bf16 1.984375. static, 2 and 1: 200 saturates at 127, 6, 2
    identity = codes([1, 0], [0, 1])
    case = single([[0, 0], [0, 0]], identity, identity, gated=False, activation="relu")
    case = case.with_(hidden_states=codes([100, -128], [3, 1]))
    token = torch.tensor([[50.0, 0.0], [6.0, 1.984375]], dtype=torch.bfloat16)
    assert torch.equal(compute(case.with_(a13_scale=torch.tensor([0.5, 2.0]))), token)
    assert torch.equal(compute(case.with_(a13_scale=torch.tensor([[0.5], [2.0]]))), token)
    static = compute(
        case.with_(activation_quant="static", a13_scale=torch.tensor(2.0), a2_scale=ONE)
    )
    assert static.dtype == torch.bfloat16
    assert static.tolist() == [[127.0, 0.0], [6.0, 2.0]]
    shared = case.with_(a13_scale=torch.tensor([2.0]), activation_quant="tensor")
    # 200, 0, 6, 2 share s = 200/127: codes 127, 0, round(3.81) = 4, round(1.27) = 1
    wanted = torch.tensor([[200.0, 0.0], [4 * 200 / 127, 200 / 127]]).bfloat16()
    assert torch.equal(compute(shared), wanted)
    assert compute(shared.with_(out_dtype=torch.float16)).dtype == torch.float16


@both
def test_contributions_are_rounded_before_the_sum_in_slot_order(compute: Compute) -> None:
    # every contribution is 257, in bf16 256; the fp32 sum of three is 768 (unrounded: 771 -> 772)
    case = single([[1.0]], codes([1]), codes([1]), gated=False, activation="relu").with_(
        w2_scale=torch.tensor([[257.0]]),
        topk_weights=torch.ones(1, 3),
        topk_ids=torch.zeros(1, 3, dtype=torch.int64),
        out_dtype=torch.bfloat16,
        activation_quant="static",
        a13_scale=ONE,
        a2_scale=ONE,
    )
    assert compute(case).tolist() == [[768.0]]
    # 256 + 1 + 1 is 258 in fp32; a sum held in bf16 would stay at 256
    case = case.with_(w2_scale=ONE.reshape(1, 1), topk_weights=torch.tensor([[256.0, 1.0, 1.0]]))
    assert compute(case).tolist() == [[258.0]]


@both
def test_intermediate_is_rounded_to_the_output_dtype(compute: Compute) -> None:
    case = single([[1.0]], codes([1]), codes([1]), gated=False, activation="relu").with_(
        w13_scale=torch.tensor([[257.0]]),
        activation_quant="static",
        a13_scale=ONE,
        a2_scale=torch.tensor(2.0625),
    )
    # 257 is no bf16 number: 257/2.0625 = 124.61 -> 125, but 256/2.0625 = 124.12 -> 124
    assert compute(case).tolist() == [[125 * 2.0625]]
    rounded = compute(case.with_(out_dtype=torch.bfloat16, w2_scale=torch.tensor([[1 / 2.0625]])))
    assert rounded.tolist() == [[124.0]]


@both
def test_products_accumulate_beyond_eight_bits(compute: Compute) -> None:
    case = single([[10, 20]], codes([10, 20]), codes([1], [0]), gated=False, activation="relu")
    case = case.with_(activation_quant="static", a13_scale=ONE, a2_scale=torch.tensor(4.0))
    assert compute(case)[0, 0] == 500.0
    wide = torch.full((512,), 127.0)[None]
    weight = torch.full((1, 512), 127, dtype=torch.int8)
    case = single(wide, weight, weight.new_ones(512, 1), gated=False, activation="relu").with_(
        activation_quant="static", a13_scale=ONE, a2_scale=torch.tensor(8258048 / 64.0)
    )
    assert compute(case)[0, 0] == 8258048.0


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_even(compute: Compute, dtype: torch.dtype) -> None:
    case = probe(torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], dtype=dtype))
    assert compute(case).tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_tiny_rows_keep_fp32(compute: Compute, dtype: torch.dtype) -> None:
    x = torch.tensor([[2e-6, 1e-6, 1e-6, -2e-6]], dtype=dtype)
    step = x.double().abs().amax() / 127
    got = torch.round(compute(probe(x)).double() / step)
    # as stored, the second is half the first: 63.5 up to the rounding of the fp32 quotients
    assert got[0, 0] == 127 and got[0, 3] == -127
    assert torch.equal(got.float(), torch.round(x.float() / (x.float().amax() / 127)))


@both
@pytest.mark.parametrize("word", ["token", "tensor", "static", "none"])
def test_gate_and_up_keep_their_own_scale(compute: Compute, word: str) -> None:
    case = with_scheme(problem(11, E=2), word)
    halves = torch.tensor([[3.85e-2, 4.83e-2]] * 2)
    written_out = halves.repeat_interleave(32, dim=1)
    got = compute(case.with_(w13_scale=halves))
    assert torch.equal(got, compute(case.with_(w13_scale=written_out)))
    assert torch.equal(got, compute(case.with_(w13_scale=halves[:, :, None])))
    larger = compute(case.with_(w13_scale=torch.full((2, 1), 4.83e-2)))
    assert (got.float() - larger.float()).abs().amax() > 0.05 * larger.float().abs().amax()


def test_activation_codes_reach_minus_128_and_weights_do_not() -> None:
    step = torch.tensor(1.0)
    x, scale = quantize.quantize_activations(torch.tensor([[-200.0, 200.0]]), "static", step)
    assert x.tolist() == [[-128, 127]] and scale.shape == (1, 1)
    weight, _ = quantize.quantize_weight(torch.tensor([[-3.0, 1.0]]))
    assert weight.tolist() == [[-127, 42]]
