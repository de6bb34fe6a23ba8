"""Route the tensors of a checkpoint through our own builders inside transformers' loader.

The loader renames every tensor, collects those that have one target and converts them. A planned
tensor is renamed to a token first, so that no other renaming touches it, and then to its target;
its builder gets the tensors one by one, when it asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from ..checkpoint_files import TensorEntry, read_tensor
from ..compat import loader_placement

_TOKEN: Final = "int8moe-planned"
_NUMBERED: Final = re.compile(rf"{_TOKEN}-(\d+)")


class Fetch:
    """Return the tensors of one target: what the loader gives, or read anew from its file."""

    def __init__(self, waiting: dict[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        self._waiting = waiting
        self.entries = entries
        self._scratch: Tensor | None = None

    def __call__(self, key: str) -> Tensor:
        """Return a tensor as the loader does; once a tensor."""
        return _materialised(self._waiting.pop(key))

    def rows(self, parts: Sequence[tuple[str, int | None]]) -> Tensor:
        """Return tensors, or slices of their first dimension, one below the other.

        Files are not mapped where that can be avoided, and the memory is used again by the next
        call of the same shape: the result is valid until then.
        """
        placement = loader_placement(self._waiting[parts[0][0]])
        if placement is None:
            found = [(_materialised(self._waiting[key]), index) for key, index in parts]
            return torch.cat([whole if index is None else whole[index] for whole, index in found])
        device, dtype = placement
        entries = [(self.entries[key], index) for key, index in parts]
        shapes = [entry.shape[index is not None :] for entry, index in entries]
        kinds = {
            (entry.dtype, shape[1:]) for (entry, _), shape in zip(entries, shapes, strict=True)
        }
        if len(kinds) > 1:
            return torch.cat([read_tensor(*entry).to(device, dtype) for entry in entries])
        ((kind, columns),) = kinds
        sizes = [shape[0] for shape in shapes]
        if self._scratch is None or self._scratch.shape != (sum(sizes), *columns):
            self._scratch = torch.empty(sum(sizes), *columns, dtype=kind)
        for (entry, index), rows in zip(entries, self._scratch.split(sizes), strict=True):
            read_tensor(entry, index, rows)
        return self._scratch.to(device=device, dtype=dtype)

    def unmapped(self, key: str) -> Tensor:
        """Return a tensor in memory of its own, without mapping the file if possible."""
        placement = loader_placement(self._waiting[key])
        if placement is None:
            return _materialised(self._waiting[key])
        device, dtype = placement
        return read_tensor(self.entries[key]).to(device=device, dtype=dtype)


# Returns the tensors of a module, by full name, that one target stands for.
Builder = Callable[[Fetch], Mapping[str, Tensor]]


class Routes:
    """Say which tensors of the checkpoint go to which builder.

    targets: tensor of the checkpoint -> parameter of the model. builders: one per target.
    entries: where the tensors lie.
    """

    def __init__(self) -> None:
        self.entries: Mapping[str, TensorEntry] = {}
        self.targets: dict[str, str] = {}
        self.builders: dict[str, Builder] = {}
        self._numbers: dict[str, int] = {}
        self._keys: list[str] = []

    def add(self, target: str, keys: tuple[str, ...], builder: Builder) -> None:
        """Send some tensors to the builder of a target."""
        assert target not in self.builders, f"{target} has two builders"
        self.builders[target] = builder
        for key in keys:
            self.drop(target, key)

    def drop(self, target: str, key: str) -> None:
        """Send a tensor to a builder that will not ask for it."""
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
        waiting = {key: found[0] for key, found in self.collected_tensors.items()}
        self.collected_tensors.clear()
        return dict(self.routes.builders[layer_name](Fetch(waiting, self.routes.entries)))


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
