"""Find the experts modules of a model: attributes decide, never class names.

An experts module carries what transformers' experts decorator sets, and its weights as 3-D
tensors, in Hugging Face's layout or, once quantised, in ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import Tensor, nn

DECORATOR_ATTRIBUTES: Final = (
    "has_gate",
    "has_bias",
    "is_transposed",
    "is_concatenated",
    "config",
    "num_experts",
)
# torch.compile's wrapper adds this to the names of everything below it.
COMPILED_PREFIX: Final = "_orig_mod."


def weight_names(module: nn.Module) -> tuple[str, str]:
    """Return the names under which transformers' own experts code reads w13 and w2."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def is_experts(module: nn.Module) -> bool:
    """Say whether a module carries the decorator's attributes and both 3-D weights."""
    if not all(hasattr(module, name) for name in DECORATOR_ATTRIBUTES):
        return False
    weights = (getattr(module, name, None) for name in weight_names(module))
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every experts module, the model itself ("") included."""
    for name, module in model.named_modules():
        if is_experts(module):
            yield name.replace(COMPILED_PREFIX, ""), module
