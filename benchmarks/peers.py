"""The contestants of the experts benchmark: each a function of (x, router weights, ids).

T tokens, H hidden, I intermediate, E experts, K experts per token. Peers get random weights of
their own format; only time is compared here, results are compared by the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from shapes import Shape
from torch import Tensor

import int8moe_compile  # noqa: F401

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def int8_arguments(shape: Shape) -> dict[str, Any]:
    """Return weights, scales and gate of the operator for a shape, on the GPU."""
    E, H, I = shape.experts, shape.hidden, shape.intermediate  # noqa: E741
    codes = {"dtype": torch.int8, "device": "cuda"}
    arguments: dict[str, Any] = {
        "w13": torch.randint(-127, 128, (E, 2 * I, H), **codes),
        "w13_scale": torch.rand(E, 2 * I, device="cuda") / (60 * H**0.5),
        "w2": torch.randint(-127, 128, (E, H, I), **codes),
        "w2_scale": torch.rand(E, H, device="cuda") / (60 * I**0.5),
    }
    if shape.is_gpt_oss:
        arguments |= {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
        arguments["w13_bias"] = torch.randn(E, 2 * I, device="cuda", dtype=torch.bfloat16)
        arguments["w2_bias"] = torch.randn(E, H, device="cuda", dtype=torch.bfloat16)
    return arguments


def eager(arguments: dict[str, Any], **options: Any) -> Run:
    """Return the operator itself, called outside a compiled graph."""
    experts = torch.ops.int8moe.experts

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return experts(x, topk_weights=weights, topk_ids=ids, **arguments, **options)

    return run


def scheme_options(quant: str) -> dict[str, Any]:
    """Return the operator's options for a way to quantise activations."""
    if quant == "token":
        return {}
    scales = {key: torch.tensor(0.03, device="cuda") for key in ("a13_scale", "a2_scale")}
    return {"activation_quant": quant} | (scales if quant == "static" else {})


def variants_of(shape: Shape, inputs: tuple[Tensor, ...], quant: str) -> tuple[Any, ...]:
    """Return the variants that take a shape at one number of tokens, the default first."""
    from int8moe_compile.lowerings import eager as launches
    from int8moe_compile.lowerings import tiles, variant_candidates, variants

    device = launches.facts_of(torch.device("cuda", torch.cuda.current_device()))
    a_bytes = 2 if quant == "none" else 1
    contributions, E = inputs[2].numel(), shape.experts
    H, I = shape.hidden, shape.intermediate  # noqa: E741
    up = tiles.Product(contributions, E, H, I, 2, a_bytes, shape.top_k)
    down = tiles.Product(contributions, E, I, H, 1, a_bytes, shape.top_k)
    return variant_candidates.candidates(up, down, device, variants.Features(quant))


def compiled(run: Run) -> Run:
    """Return a function under torch.compile, one static graph for each size."""
    return torch.compile(run, fullgraph=True, dynamic=False)


def hugging_face(shape: Shape) -> Run:
    """Return transformers' grouped_mm experts in bf16."""
    from transformers.integrations import moe

    E, H, I = shape.experts, shape.hidden, shape.intermediate  # noqa: E741
    if shape.is_gpt_oss:
        from transformers import GptOssConfig as Config
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts
    else:
        from transformers import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts
    sizes = {"num_local_experts": E} if shape.is_gpt_oss else {"num_experts": E}
    config = Config(
        hidden_size=H, intermediate_size=I, moe_intermediate_size=I, hidden_act="silu", **sizes
    )
    with torch.device("meta"):
        module = Experts(config)
    module = module.to_empty(device="cuda").to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return moe.grouped_mm_experts_forward(module, x, ids, weights)

    return run


class Humming:
    """humming-kernels' indexed INT8 products, with its own quantising kernels and a plain sum.

    Its lists of rows are made outside the measured graph: its routing is not counted. Unlike this
    package's backend of that name it takes its fastest products, with bf16 scales by channel and
    sums that may be split between programs.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        H, I = shape.hidden, shape.intermediate  # noqa: E741
        self.up = self._layer(2 * I, H)
        self.down = self._layer(H, I)
        self.total = torch.compile(
            lambda parts, weights: (
                (parts.float() * weights[..., None].float()).sum(1).to(parts.dtype)
            ),
            dynamic=True,
        )

    def _layer(self, n: int, k: int) -> tuple[Any, dict[str, Tensor]]:
        from int8moe_compile.lowerings.humming_weights import convert_codes

        E = self.shape.experts
        codes = torch.randint(-127, 128, (E, n, k), dtype=torch.int8, device="cuda")
        scale = torch.rand(E, n, 1, device="cuda") / (60 * k**0.5)
        config = functools.partial(self.config, n, k)
        return config(E), convert_codes(codes, scale.to(torch.bfloat16), config)

    @staticmethod
    def config(n: int, k: int, experts: int) -> Any:
        """Return the description of one grouped product [rows, k] x [experts, n, k]."""
        from humming.config import LayerConfig

        return LayerConfig(
            shape_n=n,
            shape_k=k,
            num_experts=experts,
            a_dtype="int8",
            b_dtype="int8",
            c_dtype="bfloat16",
            bs_dtype="bfloat16",
            as_dtype="float32",
        )

    @staticmethod
    def kernel(layer: Any, rows: int) -> tuple[Tensor, int]:
        """Compile the product of so many rows, or find it in humming's cache on disk.

        Returns what to launch and the rows of a tile.
        """
        from int8moe_compile.lowerings.humming_weights import compiled_product

        device = torch.cuda.current_device()
        product = compiled_product(layer, rows, device, is_batch_invariant=False)
        return product.launch, product.block_m

    def prepare(self, ids: Tensor) -> Run:
        """Return the layer for one routing; the rows' lists are part of the function."""
        from humming import ops
        from humming.forward import may_process_input
        from humming.testing.data import generate_moe_tensors

        rows = ids.numel()
        launches = []
        for layer, tensors in (self.up, self.down):
            kernel, block_m = self.kernel(layer, rows)
            lists = generate_moe_tensors(ids.int(), layer.num_experts, "indexed", block_m)
            names = ("sorted_ids", "expert_ids", "num_tokens_padded")
            launches.append((kernel, tensors, dict(zip(names, lists[2:], strict=True))))
        locks = torch.zeros(2048, dtype=torch.int32, device="cuda")

        def product(index: int, a: Tensor, scale: Tensor, width: int, top_k: int) -> Tensor:
            kernel, tensors, lists = launches[index]
            out = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
            return ops.launch_kernel(
                configs=kernel,
                inputs=a,
                input_scale=scale,
                outputs=out,
                locks=locks,
                top_k=top_k,
                **lists,
                **tensors,
            )

        def run(x: Tensor, weights: Tensor, _: Tensor) -> Tensor:
            codes, _, scale = may_process_input(self.up[0], x)
            middle = product(0, codes, scale, 2 * self.shape.intermediate, self.shape.top_k)
            codes, _, scale = may_process_input(
                self.down[0],
                middle,
                activation_type="binary_split",
                activation_impl="a / (1.0f + __expf(-a)) * b",
            )
            parts = product(1, codes, scale, self.shape.hidden, 1)
            return self.total(parts.view(*weights.shape, -1), weights)

        return run
