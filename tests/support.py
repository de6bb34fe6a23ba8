"""Inputs and tolerances shared by the tests: seeded problems and the one bound for outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from int8moe_compile.ops import cpu, reference
from int8moe_compile.ops.arguments import ExpertsArguments

EXPERTS = torch.ops.int8moe.experts
DEQUANTIZE = torch.ops.int8moe.dequantize

# Floor of the bound in units in the last place of the row's largest value.
ULPS = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}


@dataclass(frozen=True)
class Problem:
    """One call of int8moe::experts: the seven tensors and the keyword arguments."""

    hidden_states: Tensor
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Tensor, ...]:
        return (
            self.hidden_states,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            self.topk_weights,
            self.topk_ids,
        )

    def with_(self, **changes: Any) -> Problem:
        """Replace tensors by name, or options by any other name."""
        tensors = {k: v for k, v in changes.items() if k in self.__dataclass_fields__}
        options = {k: v for k, v in changes.items() if k not in tensors}
        return replace(self, **tensors, options={**self.options, **options})

    def rows(self, index: Any) -> Problem:
        """Keep some tokens only."""
        return self.with_(
            hidden_states=self.hidden_states[index],
            topk_weights=self.topk_weights[index],
            topk_ids=self.topk_ids[index],
        )

    def to(self, device: str) -> Problem:
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        options = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        return Problem(**moved, options=options)

    def run(self) -> Tensor:
        result: Tensor = EXPERTS(*self.args, **self.options)
        return result

    def reference(self, precision: torch.dtype = torch.float32) -> Tensor:
        return reference.experts(*self.args, precision=precision, **self.options)


def problem(
    seed: int = 0,
    T: int = 5,
    H: int = 64,
    I: int = 32,  # noqa: E741
    E: int = 4,
    K: int = 2,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    **options: Any,
) -> Problem:
    """Build a seeded problem whose outputs are of the order of 1 whatever its sizes are."""
    g = torch.Generator().manual_seed(seed)
    rows = 2 * I if gated else I

    def codes(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)

    def scales(*shape: int, fan_in: int) -> Tensor:
        uniform = torch.rand(shape, generator=g) * 2 - 1
        return torch.exp(uniform) / (73 * math.sqrt(fan_in))

    if not gated:
        options["gated"] = False
    return Problem(
        hidden_states=torch.randn(T, H, generator=g).to(dtype),
        w13=codes(E, rows, H),
        w2=codes(E, H, I),
        w13_scale=scales(E, rows, fan_in=H),
        w2_scale=scales(E, H, fan_in=I),
        topk_weights=torch.softmax(torch.randn(T, K, generator=g), -1),
        topk_ids=torch.randint(0, E, (T, K), generator=g),
        options=options,
    )


def with_scheme(case: Problem, word: str, granularity: str = "channel") -> Problem:
    """Change a problem to another activation_quant word and weight granularity."""
    if granularity != "channel":
        columns = 2 if granularity == "halves" else 1
        case = case.with_(
            w13_scale=case.w13_scale[:, :columns].contiguous(),
            w2_scale=case.w2_scale[:, :1].contiguous(),
        )
    options: dict[str, Any] = {"activation_quant": word}
    if word == "static":
        options |= {"a13_scale": torch.tensor([0.03]), "a2_scale": torch.tensor(0.05)}
    return case.with_(**options)


def row_errors(out: Tensor, exact: Tensor) -> Tensor:
    """Return each row's largest error over the row's largest exact value (1 where that is 0)."""
    out, exact = out.double().cpu(), exact.double().cpu()
    largest = exact.abs().amax(-1)
    return (out - exact).abs().amax(-1) / torch.where(largest == 0, 1.0, largest)


def assert_close(out: Tensor, case: Problem) -> None:
    """Hold an output to the contract: at most twice the reference's own error against fp64.

    The floor is one unit in the last place of the row's largest value (eight for fp32).
    """
    exact, plain = case.reference(torch.float64), case.reference()
    assert out.dtype == plain.dtype and out.shape == plain.shape
    assert out.is_contiguous()
    finite = torch.isfinite(exact).all(-1)
    assert torch.equal(torch.isfinite(out.cpu()).all(-1), finite)
    if not bool(finite.any()):
        return
    exact, plain, out = exact[finite], plain[finite], out.cpu()[finite]
    largest = exact.double().abs().amax(-1)
    exponent = torch.floor(torch.log2(torch.where(largest == 0, 1.0, largest)))
    ulp = torch.finfo(out.dtype).eps * torch.exp2(exponent) / torch.where(largest == 0, 1, largest)
    allowed = torch.maximum(2 * row_errors(plain, exact).amax(), ULPS[out.dtype] * ulp)
    worst = row_errors(out, exact) / allowed
    assert bool((worst <= 1).all()), f"error is {float(worst.max()):.2f} times the bound"


def assert_as_reference(case: Problem) -> None:
    """Hold the registered kernel to the bound, and the plain CPU kernel to the reference's bits.

    Its integer products leave nothing to tiling, so only "none" has the bound there, too.
    """
    assert_close(case.run(), case)
    plain = cpu.experts(ExpertsArguments(*case.args, **case.options))
    if case.options.get("activation_quant") == "none":
        assert_close(plain, case)
    else:
        assert torch.equal(plain, case.reference())


def probe(x: Tensor) -> Problem:
    """Build the problem whose output, divided by amax/127, is the codes of each row of x [T,H]."""
    tokens, hidden = x.shape
    eye = torch.eye(hidden, dtype=torch.int8)
    return Problem(
        hidden_states=x,
        w13=torch.cat([eye, -eye])[None],
        w13_scale=torch.ones(1, 1),
        w2=torch.cat([eye, -eye], dim=1)[None].contiguous(),
        w2_scale=torch.ones(1, 1),
        topk_weights=torch.ones(tokens, 1),
        topk_ids=torch.zeros(tokens, 1, dtype=torch.int64),
        options={"gated": False, "activation": "relu", "out_dtype": torch.float32},
    )


def poison(*shapes: tuple[int, ...], device: str = "cpu") -> None:
    """Allocate and free NaN-filled buffers, so that unwritten results show."""
    buffers = [torch.full(shape, math.nan, device=device) for shape in shapes]
    del buffers
