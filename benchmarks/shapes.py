"""The experts layers that every benchmark measures, and the numbers of tokens; one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Describe one model's experts layer: E experts, K of them per token, sizes H and I."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: tuple[int, ...]
    # gpt-oss: biases, and silu with alpha 1.702, beta 1, limit 7.
    is_gpt_oss: bool = False

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of one expert's INT8 codes."""
        return 3 * self.hidden * self.intermediate


SHAPES: tuple[Shape, ...] = (
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768, (1, 16, 64, 256, 1024, 4096, 16384)),
    Shape("qwen1.5-moe-a2.7b", 60, 4, 2048, 1408, (1, 64, 1024, 4096)),
    Shape("mixtral-8x7b", 8, 2, 4096, 14336, (1, 16, 256, 4096, 16384)),
    Shape("deepseek-v3", 256, 8, 7168, 2048, (1, 64, 1024, 4096)),
    Shape("olmoe-1b-7b", 64, 8, 2048, 1024, (1, 16, 64, 256, 1024, 4096, 16384)),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, (1, 16, 64, 256, 1024, 4096, 16384), True),
)

# Microseconds to reach on an H200 (docs/performance.md), by shape and tokens.
TARGETS: dict[tuple[str, int], float] = {
    ("qwen3-30b-a3b", 1): 20,
    ("qwen3-30b-a3b", 16): 108,
    ("qwen3-30b-a3b", 64): 158,
    ("qwen3-30b-a3b", 256): 168,
    ("qwen3-30b-a3b", 1024): 195,
    ("qwen3-30b-a3b", 4096): 400,
    ("qwen3-30b-a3b", 16384): 1350,
    ("qwen1.5-moe-a2.7b", 1): 20,
    ("qwen1.5-moe-a2.7b", 64): 137,
    ("qwen1.5-moe-a2.7b", 1024): 170,
    ("qwen1.5-moe-a2.7b", 4096): 340,
    ("mixtral-8x7b", 1): 98,
    ("mixtral-8x7b", 16): 345,
    ("mixtral-8x7b", 256): 375,
    ("mixtral-8x7b", 4096): 2500,
    ("mixtral-8x7b", 16384): 10200,
    ("deepseek-v3", 1): 100,
    ("deepseek-v3", 64): 2130,
    ("deepseek-v3", 1024): 2670,
    ("deepseek-v3", 4096): 3800,
}


def shape_named(name: str) -> Shape:
    """Return a shape of the table by its name, or the one that a name begins."""
    for shape in SHAPES:
        if shape.name.startswith(name):
            return shape
    raise ValueError(f"shape: wanted one of {[shape.name for shape in SHAPES]}, got {name!r}")


def floor_us(
    shape: Shape,
    active_experts: int,
    tokens: int,
    *,
    bandwidth: float = 4.3e12,
    ops: float = 1.29e15,
) -> float:
    """Return the least time in microseconds: bytes of the active experts, or operations."""
    moved = active_experts * shape.weight_bytes / bandwidth
    computed = 2.0 * tokens * shape.top_k * shape.weight_bytes / ops
    return 1e6 * max(moved, computed)
