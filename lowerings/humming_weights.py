"""Hand weights and products to humming-kernels: its layout of codes, its kernels, both cached.

E local experts, N rows of a weight (its outputs), K its columns (inputs). Importing this imports
nothing of humming; what is called does.

A product of humming gives round(acc * (row scale * expert scale)), with one fp32 scale an expert;
its scales by channel are bf16 or fp16 only. So an expert's scale is the power of two above its
channels' greatest, the channels' own, divided by it, stay fp32 and are applied by our kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import storage_identity

# Sizes of a weight are padded to whole tiles of its kernels.
TILE: Final = 128
# Codes converted in one step: what a step allocates is some four times as much.
STEP_CODES: Final = 1 << 28
# Flips the top bit: signed codes become the offset-binary ones that its conversion takes.
OFFSET: Final = -128

MakeConfig = Callable[[int], Any]


@dataclass(frozen=True)
class Weight:
    """Hold a converted weight: humming's codes, expert scales [E] and channel scales [E,N]."""

    codes: Tensor
    expert_scale: Tensor
    channel_scale: Tensor


@dataclass(frozen=True)
class Product:
    """Hold one compiled product of humming and the rows of its tiles."""

    launch: Tensor
    block_m: int


@dataclass(frozen=True)
class ProductSizes:
    """Describe one grouped product [rows, columns] x [experts, outputs, columns]."""

    outputs: int
    columns: int
    experts: int
    dtype: torch.dtype

    def config(self, experts: int) -> Any:
        """Return humming's description of the product, for some of the experts."""
        from humming.config import LayerConfig

        pad_n, pad_k = -self.outputs % TILE, -self.columns % TILE
        return LayerConfig(
            shape_n=self.outputs + pad_n,
            shape_k=self.columns + pad_k,
            pad_shape_n=pad_n,
            pad_shape_k=pad_k,
            num_experts=experts,
            a_dtype="int8",
            b_dtype="int8",
            c_dtype=str(self.dtype).removeprefix("torch."),
            as_dtype="float32",
            weight_scale_type="tensor",
        )


def convert_codes(codes: Tensor, scale: Tensor, config: MakeConfig) -> dict[str, Tensor]:
    """Return humming's tensors for int8 codes [E,N,K] and scales of the kind that config names.

    config: number of experts -> humming's LayerConfig. Some experts at a time, to save memory.
    """
    from humming.transform import transform_humming_tensors

    step = max(1, STEP_CODES // codes[0].numel())
    converted: dict[str, Tensor] = {}
    for first in range(0, codes.shape[0], step):
        last = min(first + step, codes.shape[0])
        packed = torch.bitwise_xor(codes[first:last], OFFSET).contiguous().view(torch.int32)
        given = {"weight": packed, "weight_scale": scale[first:last]}
        for name, part in transform_humming_tensors(config(last - first), given).items():
            if name not in converted:
                converted[name] = part.new_empty((codes.shape[0], *part.shape[1:]))
            converted[name][first:last] = part
    return converted


def split_scale(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Split scales [E,N] into powers of two [E] and the rest [E,N]; their product is exact."""
    greatest = scale.amax(1)
    _, exponent = torch.frexp(greatest)
    power = torch.ldexp(torch.ones_like(greatest), exponent)
    power = torch.where(torch.isfinite(power) & (greatest > 0), power, 1.0)
    return power, scale / power[:, None]


_converted: Final = WeakTensorKeyDictionary()


def converted_weight(name: str, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Weight:
    """Return a weight in humming's layout, converted when first met and after every change.

    Kept as long as the tensor of codes lives. Raises ValueError for a tensor whose changes torch
    does not count, RuntimeError while a CUDA graph is recorded: the conversion would be replayed.
    """
    # humming is told the dtype of its products when it converts.
    state = (dtype, _state(name, codes), _state(f"{name}_scale", scale))
    known = _converted.get(codes)
    if known is not None and known[0] == state:
        return known[1]  # type: ignore[no-any-return]
    refuse_recording(f"a conversion of {name}")
    experts, outputs, columns = codes.shape
    power, rest = split_scale(scale.detach().reshape(experts, outputs))
    sizes = ProductSizes(outputs, columns, experts, dtype)
    tensors = convert_codes(codes.detach(), power, sizes.config)
    weight = Weight(tensors["weight"], power, rest)
    _converted[codes] = (state, weight)
    return weight


def _state(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Return what changes with a tensor's content: storage, place in it, count of writes."""
    if tensor.is_inference():
        raise ValueError(
            f"{name}: wanted a tensor whose writes torch counts, with humming, got one made under "
            "torch.inference_mode(); load or quantise the model outside of it"
        )
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return (storage_identity(tensor), *place, tensor._version)


def refuse_recording(what: str) -> None:
    """Raise RuntimeError where a CUDA graph is being recorded."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"int8moe::humming_experts needs {what}, which a CUDA graph cannot record: call it "
            "with these weights and this number of tokens once before the capture"
        )


@functools.lru_cache(maxsize=4096)
def product_of(sizes: ProductSizes, rows: int, device: int) -> Product:
    """Return the product for so many rows in all, with sums that depend on no other row."""
    refuse_recording("to compile a product")
    return compiled_product(sizes.config(sizes.experts), rows, device)


def compiled_product(
    config: Any, rows: int, device: int, *, is_batch_invariant: bool = True
) -> Product:
    """Compile the product that humming's tables choose, or find it in its cache on disk."""
    from humming.config import ComputeConfig
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    options = {"gemm_type": "indexed", "use_batch_invariant": is_batch_invariant}
    tile = get_heuristics_config(config, shape_m=rows, device=device, **options)
    launches = HummingKernel.prepare_kernels(
        config.to_str(), ComputeConfig(**options).to_str(), [(0, 1 << 30, tile)], device=device
    )
    return Product(launches.reshape(-1, 4)[0], tile["block_shape"][0])
