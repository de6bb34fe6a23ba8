"""Hold fakes and kernels to one text for each malformed argument, whatever is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from malformed import BAD, E, H, I, K, T, base, coded, floats, ints
from support import DEQUANTIZE, EXPERTS, Problem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from int8moe_compile.ops.arguments import ExpertsArguments
from int8moe_compile.ops.checks import check_experts

ROW_TENSORS = ("hidden_states", "topk_weights", "topk_ids", "a13_scale")


def message(run: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        run()
    return str(error.value)


def named(case: Problem) -> dict[str, Any]:
    return {**ExpertsArguments(*case.args, **case.options)._asdict()}


def traced(case: Problem, sizes: str) -> tuple[Callable[[], Any], ShapeEnv]:
    """Return a call on fake tensors whose rows are counted by a static, symbolic or unbacked T."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    tokens: dict[int, Any] = {}

    def fake(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if sizes == "static" or name not in ROW_TENSORS or value.dim() == 0 or value.shape[0] < 2:
            return mode.from_tensor(value, static_shapes=True)
        if sizes == "symbolic":
            dynamic = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (value.dim() - 1)
            return mode.from_tensor(
                value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic)
            )
        count = tokens.setdefault(value.shape[0], env.create_unbacked_symint())
        with mode:
            return torch.empty(count, *value.shape[1:], dtype=value.dtype, device=value.device)

    arguments = {name: fake(name, value) for name, value in named(case).items()}

    def run() -> Any:
        with mode:
            return EXPERTS(**arguments)

    return run, env


@pytest.mark.parametrize("name", BAD)
def test_fake_and_kernel_refuse_alike(name: str) -> None:
    entry = BAD[name]
    case = entry.make()
    text = message(case.run)
    assert text.startswith(f"{entry.argument}: wanted ") and ", got " in text
    assert entry.wanted in text
    for sizes in ("static", "symbolic"):
        run, _ = traced(case, sizes)
        assert message(run) == text
    with torch.inference_mode():
        assert message(case.run) == text
    assert message(lambda: case.with_(hidden_states=_learns(case)).run()) == text


def _learns(case: Problem) -> Tensor:
    x = case.hidden_states.clone()
    return x.requires_grad_() if x.is_floating_point() else x


@pytest.mark.parametrize("name", BAD)
def test_unbacked_sizes_are_refused_only_where_no_value_fits(name: str) -> None:
    entry = BAD[name]
    run, env = traced(entry.make(), "unbacked")
    if entry.of_tokens:
        assert run().shape[1] == H
        assert any(len(asserts) > 1 for asserts in env.deferred_runtime_asserts.values())
    else:
        assert message(run).startswith(f"{entry.argument}: wanted ")


GOOD: dict[str, Callable[[], Problem]] = {
    "token": base,
    "tensor": lambda: base("tensor"),
    "static": lambda: base("static"),
    "none": lambda: base("none"),
    "codes [T]": coded,
    "codes [T,1]": lambda: coded(a13_scale=floats(T, 1)),
    "codes tensor": lambda: coded("tensor", a13_scale=floats()),
    "codes static": lambda: coded("static"),
    "scale [E,N,1]": lambda: base().with_(w13_scale=floats(E, 2 * I, 1), w2_scale=floats(E, H, 1)),
    "scale [E,1,1]": lambda: base().with_(w13_scale=floats(E, 1, 1), w2_scale=floats(E, 1, 1)),
    "scale [E,1]": lambda: base().with_(w13_scale=floats(E, 1), w2_scale=floats(E, 1)),
    "scale [E,2]": lambda: base().with_(w13_scale=floats(E, 2)),
    "scale [E,2,1]": lambda: base().with_(w13_scale=floats(E, 2, 1)),
    "alpha, not gated": lambda: base(gated=False, alpha=1.702),
    "limit inf": lambda: base().with_(limit=float("inf")),
    "limit beyond fp32": lambda: base().with_(limit=1e39),
    "map": lambda: base().with_(expert_map=ints(9, dtype=torch.int32)),
    "int32 ids": lambda: base().with_(topk_ids=ints(T, K, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", GOOD)
def test_fakes_describe_the_result(name: str) -> None:
    case = GOOD[name]()
    real = case.run()
    for sizes in ("static", "symbolic", "unbacked"):
        run, env = traced(case, sizes)
        out = run()
        assert out.dtype == real.dtype and out.shape[1] == H and out.stride() == (H, 1)
        assert out.device == real.device
        if sizes == "symbolic":
            assert not isinstance(out.shape[0], int) and out.shape[0].node.hint == T
            # T may be tied to the other rows' T, never to a number
            assert all(not guard.expr.is_number for guard in env.guards)
            assert {str(s) for guard in env.guards for s in guard.expr.atoms() if s.is_number} == (
                set()
            )
        if sizes == "unbacked":
            assert not isinstance(out.shape[0], int)
    meta = ExpertsArguments(**named(case))
    moved = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in meta._asdict().items()}
    assert EXPERTS(**moved).device.type == "meta"


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_the_short_way_of_the_kernels_gives_the_same_answer(name: str) -> None:
    case = GOOD[name]() if name in GOOD else BAD[name].make()
    call = ExpertsArguments(*case.args, **case.options)
    answers = []
    for flag in (True, False):
        try:
            check_experts(call, traced=flag)
            answers.append("")
        except ValueError as error:
            answers.append(str(error))
    assert answers[0] == answers[1]
    assert bool(answers[0]) == (name in BAD)


BAD_DEQUANTIZE: dict[str, tuple[str, dict[str, Any]]] = {
    "codes of floats": ("codes", {"codes": floats(E, 4, H)}),
    "codes 1-D": ("codes", {"codes": ints(H), "scale": floats(1)}),
    "scale fp16": ("scale", {"scale": floats(E, 4, dtype=torch.half)}),
    "scale [4]": ("scale", {"scale": floats(4)}),
    "scale [E,3]": ("scale", {"scale": floats(E, 3)}),
    "halves of odd rows": ("scale", {"codes": ints(E, 5, H), "scale": floats(E, 2)}),
    "scale grouped": ("scale", {"scale": floats(E, 4, 2)}),
    "dtype int": ("dtype", {"dtype": torch.int32}),
    "dtype fp64": ("dtype", {"dtype": torch.float64}),
    "word": ("activation_quant", {"activation_quant": "per_token"}),
    "static without": ("a_scale", {"activation_quant": "static"}),
    "static per row": ("a_scale", {"activation_quant": "static", "a_scale": floats(2)}),
    "scale with token": ("a_scale", {"a_scale": floats(1)}),
    "scale elsewhere": ("scale", {"scale": floats(E, 4, device="meta")}),
    "a_scale elsewhere": (
        "a_scale",
        {"activation_quant": "static", "a_scale": floats(1, device="meta")},
    ),
}


@pytest.mark.parametrize("name", BAD_DEQUANTIZE)
def test_dequantize_refuses_alike(name: str) -> None:
    argument, changes = BAD_DEQUANTIZE[name]
    call = {"codes": ints(E, 4, H), "scale": floats(E, 4), "dtype": torch.bfloat16, **changes}
    text = message(lambda: DEQUANTIZE(**call))
    assert text.startswith(f"{argument}: wanted ") and ", got " in text
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()}
        assert message(lambda: DEQUANTIZE(**fakes)) == text


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.sparse_coo": Tensor.to_sparse,
    "torch._mkldnn": Tensor.to_mkldnn,
    "torch.sparse_csr": Tensor.to_sparse_csr,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["hidden_states", "w2_scale", "topk_weights", "w13_bias"])
def test_tensors_without_strides_are_refused_by_name(name: str, layout: str) -> None:
    case = base(dtype=torch.float32).with_(w13_bias=floats(E, 2 * I))
    tensor = LAYOUTS[layout](named(case)[name])
    case = case.with_(**{name: tensor})
    text = f"{name}: wanted a dense tensor (layout torch.strided), got {layout}"
    assert message(case.run) == text
    with torch.inference_mode():
        assert message(case.run) == text
    learning = case.with_(w2_bias=floats(E, H).requires_grad_())
    assert message(learning.run) == text
    if layout == "torch.sparse_coo":  # of the others torch makes no fake that keeps the layout
        run, _ = traced(case, "static")
        assert message(run) == text


def test_sparse_codes_are_refused_by_name() -> None:
    for name, changes in (
        ("w13", {"w13": ints(E, 2 * I, H).to_sparse()}),
        ("topk_ids", {"topk_ids": ints(T, K, dtype=torch.int64).to_sparse()}),
    ):
        case = base().with_(**changes)
        assert message(case.run).startswith(f"{name}: wanted a dense tensor")
    sparse = ints(E, 4, H).to_sparse()
    text = message(lambda: DEQUANTIZE(sparse, floats(E, 4), dtype=torch.float32))
    assert text.startswith("codes: wanted a dense tensor")
