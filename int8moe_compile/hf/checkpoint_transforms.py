"""Route the tensors of a checkpoint through our own builders inside transformers' loader.

The loader renames every tensor, collects those that have one target and converts them. A planned
tensor is renamed to a token first, so that no other renaming touches it, and then to its target;
its builder gets the tensors one by one, when it asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from .checkpoint_assemble import Fetch

_TOKEN: Final = "int8moe-planned"
_NUMBERED: Final = re.compile(rf"{_TOKEN}-(\d+)")

# Returns the tensors of a module, by full name, that one target stands for.
Builder = Callable[[Fetch], Mapping[str, Tensor]]


class Routes:
    """Say which tensors of the checkpoint go to which builder.

    targets: tensor of the checkpoint -> parameter of the model. builders: one per target.
    """

    def __init__(self) -> None:
        self.targets: dict[str, str] = {}
        self.builders: dict[str, Builder] = {}
        self._numbers: dict[str, int] = {}
        self._keys: list[str] = []

    def add(self, target: str, keys: tuple[str, ...], builder: Builder) -> None:
        """Send some tensors to the builder of a target."""
        assert target not in self.builders, f"{target} has two builders"
        self.builders[target] = builder
        for key in keys:
            self.targets[key] = target
            self._numbers[key] = len(self._keys)
            self._keys.append(key)

    def token(self, key: str) -> str | None:
        """Return what a tensor is called while the loader's own renamings run."""
        number = self._numbers.get(key)
        return None if number is None else f"{_TOKEN}-{number}"

    def target(self, text: str) -> str | None:
        """Return the target that a renamed token stands for."""
        match = _NUMBERED.search(text)
        return None if match is None else self.targets[self._keys[int(match[1])]]


class PlannedRenaming(WeightRenaming):
    """Rename every planned tensor to its token."""

    def __init__(self, routes: Routes) -> None:
        super().__init__(_TOKEN, _TOKEN)
        self.routes = routes

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the token of a planned tensor, any other name as it is."""
        token = self.routes.token(source_key)
        return (source_key, None) if token is None else (token, _TOKEN)


class PlannedConverter(WeightConverter):
    """Collect the planned tensors of one target and hand them to its builder."""

    def __init__(self, routes: Routes) -> None:
        super().__init__([_TOKEN], [_TOKEN], [_Nothing()])
        self.routes = routes

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedConverter:
        # The loader copies the converter for every tensor of the checkpoint.
        return PlannedConverter(self.routes)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the target of a token, any other name as it is."""
        target = self.routes.target(source_key)
        return (source_key, None) if target is None else (target, _TOKEN)

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: Any
    ) -> None:
        """Keep a tensor, or what will load it, under its own name."""
        self.collected_tensors[source_key].append(future)
        self.layer_targets[target_key].add(source_key)

    @torch.no_grad()
    def convert(self, layer_name: str, *args: Any, **context: Any) -> dict[str, Tensor]:
        """Build the target. What is raised here ends the load, with no model returned."""
        waiting = dict(self.collected_tensors)
        self.collected_tensors.clear()

        def fetch(key: str) -> Tensor:
            return _materialised(waiting.pop(key)[0])

        return dict(self.routes.builders[layer_name](fetch))


class _Nothing(ConversionOps):
    """Stand where a converter must have an operation."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """Return what came."""
        return input_dict

    @property
    def reverse_op(self) -> _Nothing:
        """Return itself."""
        return self


def _materialised(waiting: Any) -> Tensor:
    """Return a tensor that a thread loads, that a function loads, or that is there."""
    if isinstance(waiting, Future):
        tensor = waiting.result()
    else:
        tensor = waiting() if callable(waiting) else waiting
    assert isinstance(tensor, Tensor), f"the loader gave {type(tensor).__name__} for a tensor"
    return tensor
