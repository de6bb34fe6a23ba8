"""Find experts that transformers keeps outside its experts interface, and say why they stay.

Such modules run their own code: no implementation can be chosen for them and no graph of theirs
is one of transformers' experts functions. quantize_ and explain name them, so that nobody takes
a model for INT8 whose experts are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import nn

from .discovery import COMPILED_PREFIX, is_experts

# Attributes under which a module keeps the number of its routed experts; shared ones go by others.
COUNTS: Final = (
    "num_experts",
    "num_local_experts",
    "num_routed_experts",
    "n_routed_experts",
    "moe_num_experts",
    "groups",
)
CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
UNDECORATED: Final = "it does not use transformers' experts interface (use_experts_implementation)"
# What else about a class the operator does not do.
PECULIARITIES: Final = {
    "Llama4TextExperts": (
        "every expert sees every token, scaled by the router before the first product"
    ),
    "Step3p7Experts": "the gate is clamped after its activation, the operator clamps before it",
    "LongcatFlashExperts": (
        "ids from the number of weights on are identity experts, which return the token itself"
    ),
    "JetMoeParallelExperts": "each product is a module of its own, with a loop over experts",
    "DbrxExperts": "the experts lie one below the other in 2-D weights, with a loop over them",
}


def find_unsupported(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every group of routed experts that is_experts does not know."""
    done = {name for name, module in model.named_modules() if is_experts(module)}
    around_known = {outer for name in done for outer in _outer_names(name)}
    for name, module in model.named_modules():
        if name in done or name in around_known or done & set(_outer_names(name)):
            continue
        if _holds_experts(name, module):
            found, group = _widened(model, name, module)
            done.add(found)
            yield found.replace(COMPILED_PREFIX, ""), group


def reason_unsupported(module: nn.Module) -> str:
    """Say why such a module is left as it was, by the name of its class."""
    kind = type(module).__name__
    details = [UNDECORATED, *filter(None, [PECULIARITIES.get(kind)])]
    return f"{kind} is not supported and stays in floating point: {'; '.join(details)}"


def _outer_names(name: str) -> Iterator[str]:
    """List the names of the modules around one, from the inside to the model itself ("")."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Say whether a module owns the weights of several experts itself, in whatever form."""
    if isinstance(module, CONTAINERS):
        count = _count(module) or (len(module) if name.rpartition(".")[2] == "experts" else 0)
        return count > 1 and len(module) >= count and any(True for _ in module.parameters())
    count = _count(module)
    if count < 2 or isinstance(module, nn.modules.conv._ConvNd):
        return False
    own = list(module.parameters(recurse=False))
    stacked = [weight for weight in own if weight.dim() >= 3 and weight.shape[0] == count]
    rows = [weight.shape[0] for weight in own if weight.dim() == 2 and weight.shape[0] > count]
    return bool(stacked) or sum(number % count == 0 for number in rows) > 1


def _count(module: nn.Module) -> int:
    """Return the number of experts that a module states, 0 without one."""
    values = (getattr(module, name, None) for name in COUNTS)
    return next((value for value in values if type(value) is int), 0)


def _widened(model: nn.Module, name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return the module around one if there are only experts in it, else the module itself."""
    outer_name = name.rpartition(".")[0]
    outer = model.get_submodule(outer_name)
    if not name or isinstance(outer, CONTAINERS) or isinstance(module, CONTAINERS):
        return name, module
    experts = [inner for inner in outer.children() if _holds_experts("", inner)]
    held = {id(weight) for inner in experts for weight in inner.parameters()}
    only_experts = all(id(weight) in held for weight in outer.parameters())
    return (outer_name, outer) if only_experts else (name, module)
