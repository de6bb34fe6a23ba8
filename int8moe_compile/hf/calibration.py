"""Measure what enters the two products of every experts module, for static activation scales."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from ..ops.quantize import scale_of
from .record import record_of
from .view import ExpertsView, forward_slot

WANTED: Final = "an iterable of model inputs (each a tensor, a dict or a tuple)"


@dataclass
class Range:
    """Hold the largest magnitudes met so far; None before the first live contribution."""

    a13: Tensor | None = None
    a2: Tensor | None = None

    def scales(self) -> tuple[Tensor, Tensor] | str:
        """Return the two static scales, fp32 [1] each, or why there are none."""
        if self.a13 is None or self.a2 is None:
            return "no calibration input reached it"
        if not bool(torch.isfinite(torch.stack((self.a13, self.a2))).all()):
            return "calibration met values that are not finite"
        return scale_of(self.a13).reshape(1), scale_of(self.a2).reshape(1)


class _Observer:
    """Stand in for a module in transformers' grouped code and note what its gate returns.

    That code zeroes the rows of slots without an expert before the gate and after it, and a gate
    maps 0 to 0, so that live contributions alone decide.
    """

    def __init__(self, module: Any, found: Range) -> None:
        self._module = module
        self._found = found

    # From transformers 5.24 on only such modules have their slots without an expert zeroed.
    _is_expert_parallel = True

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name != ("_apply_gate" if self._module.has_gate else "act_fn"):
            return value

        def noting(h: Tensor) -> Tensor:
            result = cast(Tensor, value(h))
            self._found.a2 = _larger(self._found.a2, result)
            return result

        return noting


def measure(
    model: nn.Module, modules: Mapping[str, nn.Module], calibration: object
) -> dict[str, Range]:
    """Run the model on every calibration input and return the ranges met by the named modules.

    The model runs in eval mode without gradients, with a progress bar; training flags and forwards
    are restored. Raises ValueError for a calibration that is no iterable, empty or of a wrong kind.
    """
    from tqdm.auto import tqdm

    ranges = {name: Range() for name in modules}
    count = 0
    bar = tqdm(check_calibration(calibration), desc="calibrating", unit="input")
    with _observed(model, modules, ranges), torch.no_grad():
        for inputs in bar:
            _run(model, inputs)
            count += 1
    if count == 0:
        raise ValueError(f"calibration: wanted {WANTED}, got an empty one")
    return ranges


def check_calibration(calibration: Any) -> Iterable[Any]:
    """Return the inputs of a calibration: of an iterable, or of a dataset with length and items.

    Raises ValueError for anything else, and for an empty list.
    """
    kind = type(calibration)
    if isinstance(calibration, (Tensor, str, bytes, Mapping)):
        raise ValueError(f"calibration: wanted {WANTED}, got {kind.__name__}")
    if isinstance(calibration, (list, tuple)) and not calibration:
        raise ValueError(f"calibration: wanted {WANTED}, got an empty one")
    if isinstance(calibration, Iterable):
        return calibration
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise ValueError(f"calibration: wanted {WANTED}, got {kind.__name__}")
    return (calibration[index] for index in range(len(calibration)))


def _has_no_tensor(value: object) -> bool:
    """Say whether a value is made of numbers and texts alone, as token ids in lists are."""
    if isinstance(value, Mapping):
        return all(_has_no_tensor(one) for one in value.values())
    if isinstance(value, (tuple, list)):
        return all(_has_no_tensor(one) for one in value)
    return value is None or isinstance(value, (int, float, str, bytes))


def _run(model: nn.Module, inputs: object) -> None:
    """Call the model with one calibration input."""
    if isinstance(inputs, (Mapping, tuple, list)) and _has_no_tensor(inputs):
        raise ValueError(
            f"calibration: wanted {WANTED}, got an item {type(inputs).__name__} without a tensor; "
            "torch.tensor([ids]) makes one of token ids"
        )
    if isinstance(inputs, Tensor):
        model(inputs)
    elif isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, (tuple, list)):
        model(*inputs)
    else:
        raise ValueError(f"calibration: wanted {WANTED}, got an item {type(inputs).__name__}")


@contextmanager
def _observed(
    model: nn.Module, modules: Mapping[str, nn.Module], ranges: Mapping[str, Range]
) -> Iterator[None]:
    """Exchange the forwards of the modules and put the model into eval mode, for a while."""
    training = [module for module in model.modules() if module.training]
    slots = {name: forward_slot(module) for name, module in modules.items()}
    before = {name: module.__dict__.get(slots[name]) for name, module in modules.items()}
    model.eval()
    try:
        for name, module in modules.items():
            setattr(module, slots[name], types.MethodType(_observing(ranges[name]), module))
        yield
    finally:
        for name, module in modules.items():
            module.__dict__.pop(slots[name], None)
            if before[name] is not None:
                setattr(module, slots[name], before[name])
        for module in training:
            module.training = True


def _observing(found: Range) -> Any:
    """Return a forward that runs transformers' grouped code and widens a range."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Families name the arguments differently; their order is the same in all of them.
        bound = inspect.signature(type(self).forward).bind(self, *args, **kwargs)
        _, hidden_states, ids, weights = bound.args
        live = ((ids >= 0) & (ids < self.num_experts)).any(dim=-1, keepdim=True)
        found.a13 = _larger(found.a13, hidden_states.masked_fill(~live, 0.0))
        record = record_of(self)
        module = self if record is None else ExpertsView(self, record)
        return grouped_mm_experts_forward(
            cast(nn.Module, _Observer(module, found)), hidden_states, ids, weights
        )

    return forward


def _larger(amax: Tensor | None, values: Tensor) -> Tensor | None:
    """Return the larger of a maximum so far and the largest magnitude of more values."""
    if values.numel() == 0:
        return amax
    new = values.abs().amax().to(torch.float32)
    return new if amax is None else torch.maximum(amax, new)
