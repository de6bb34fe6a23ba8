"""Run a small case of every CUDA kernel; scripts/run_gpu_tests.sh puts compute-sanitizer around."""

from __future__ import annotations

import importlib.util
import sys

import torch
from support import EXPERTS, assert_close, problem, with_scheme
from test_lowerings_gpu_variants import found, run_apart

from int8moe_compile.lowerings import prepared, variants
from int8moe_compile.lowerings.eager_variants import EagerHost


def main() -> None:
    """Run eager and compiled calls whose tiles, masks and routings differ."""
    biases = {"w13_bias": torch.randn(4, 96), "w2_bias": torch.randn(4, 80)}
    ids = torch.tensor([[0, 1], [-1, 3], [3, 4], [2, 2], [-1, -1], [1, 0], [0, 3]])
    cases = [
        problem(1, T=7, H=80, I=48, E=4, limit=1.0, **biases).with_(topk_ids=ids),
        problem(2, T=300, H=256, I=128, E=4, K=4),
        problem(3, T=600, H=96, I=33, E=2, K=2),
        with_scheme(problem(4, T=9), "tensor"),
        with_scheme(problem(5, T=9), "static"),
        with_scheme(problem(6, T=300, H=128, I=64, E=4, K=2), "none"),
        problem(7, T=9, K=1, apply_router_weight_on_input=True),
        problem(8, T=9, E=2).with_(expert_map=torch.tensor([1, -1, 0, 5])),
        problem(9, T=2100, H=64, I=32, E=4, K=4),
    ]
    for number, case in enumerate(cases):
        there = case.to("cuda")
        assert_close(there.run(), case)
        print("eager", number, flush=True)
        if number in (0, 1, 3, 6, 8) and "--eager-only" not in sys.argv:
            torch._dynamo.reset()
            function = torch.compile(
                lambda *args, options=there.options: EXPERTS(*args, **options), fullgraph=True
            )
            with torch.no_grad():
                assert_close(function(*there.args), case)
            print("compiled", number, flush=True)
    run_variants()
    run_humming()
    torch.cuda.synchronize()


def run_variants() -> None:
    """Run every variant of a small layer with few and with many tokens, a few tiles a program."""
    EagerHost.multiprocessors = lambda host: 3  # type: ignore[method-assign]
    # 65 rows an expert on average: tiles of both products in one launch have a rest.
    sizes = ((2, "token"), (2, "static"), (2, "none"), (260, "token"), (300, "token"))
    for T, word in sizes:
        case = problem(9, T=T, H=512, I=384, E=8, K=2)
        there = with_scheme(case, word).to("cuda")
        expected = run_apart(there)
        for variant in found(there):
            if variant.up.loads == "stream" and "--without-stream" in sys.argv:
                continue
            with variants.forced(variant):
                out = there.run()
            if word == "none":
                assert_close(out, there.to("cpu"))
            else:
                assert torch.equal(out, expected), variants.label(variant)
            print("variant", T, word, variants.label(variant), flush=True)


def run_humming() -> None:
    """Run the kernels around humming's products, where that is installed."""
    if importlib.util.find_spec("humming") is None:
        print("humming: absent", flush=True)
        return
    case = problem(10, T=70, H=256, I=128, E=4, K=2).to("cuda")
    torch.ops.int8moe.humming_experts(*case.args, **case.options)
    print("humming", flush=True)


if __name__ == "__main__":
    # Repeated calls keep all buffers in one, where a step past one's end is none past memory's.
    with prepared.plainly():
        main()
