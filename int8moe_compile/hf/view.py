"""Run Hugging Face's own code of an experts module on top of its int8 weights.

The module keeps int8 codes. An instance-level forward hands ``type(module).forward`` a view that
delegates every attribute but the weights and biases; those it gives in the layout that the code
expects, dequantised by the marker operator, by which the graph pass knows them again.
(Class properties over ``_parameters`` instead broke pickle and accelerate's offload.)
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from dataclasses import replace
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn

from ..compat import literal
from ..ops.checks import FLOATS
from ..passes.layouts import Which, to_hf_bias, to_hf_layout
from .record import RECORD, ExpertsRecord, record_of

SCALE: Final = "_scale"
INPUT_SCALE: Final = "_input_scale"
BIAS: Final = "_bias"


class ExpertsView:
    """Give the module's own code float weights in its own layout, everything else unchanged."""

    def __init__(self, module: nn.Module, record: ExpertsRecord) -> None:
        self._module = module
        self._record = record

    def __getattr__(self, name: str) -> Any:
        module, record = self._module, self._record
        structure = record.structure
        if name == structure.w13_name:
            return marked_weight(module, record, "w13")
        if name == structure.w2_name:
            return marked_weight(module, record, "w2")
        value = getattr(module, name)
        if name == structure.w13_name + BIAS and _has_codes(module, structure.w13_name):
            return to_hf_bias(value, structure.layout, "w13")
        if type(value) is float:
            return literal(value)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return functools.partial(value.__func__, self)
        return value


def marked_weight(module: nn.Module, record: ExpertsRecord, which: Which) -> Tensor:
    """Return one weight dequantised by the marker, in the layout of the module's own code."""
    structure = record.structure
    name = structure.w13_name if which == "w13" else structure.w2_name
    codes = getattr(module, name)
    if not _has_codes(module, name):  # quantize_ was interrupted: still Hugging Face's own
        return cast(Tensor, codes)
    weight = torch.ops.int8moe.dequantize(
        codes,
        getattr(module, name + SCALE),
        dtype=record.dtype,
        activation_quant=record.scheme.activation_quant,
        a_scale=getattr(module, name + INPUT_SCALE, None),
    )
    return to_hf_layout(weight, structure.layout, which)


def run_on_view(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the class's own forward with a view in place of the module."""
    record = record_of(module)
    assert record is not None, "the forward of an experts module outlived its record"
    return type(module).forward(cast(nn.Module, ExpertsView(module, record)), *args, **kwargs)


def forward_of(module: nn.Module) -> functools.partial[Any]:
    """Return the forward of a quantised instance.

    A partial, since torch.export knows nothing else beside functions, and copies of it follow the
    module; with the class's own signature, after which torch.export names inputs.
    """
    forward = functools.partial(run_on_view, module)
    own = types.MethodType(type(module).forward, module)
    setattr(forward, "__signature__", inspect.signature(own))  # noqa: B010
    return forward


class ApplyKeepingCodes:
    """Stand in for a module's ``_apply``: codes and fp32 scales change device, never dtype."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Apply fn to every tensor of the module, and follow the dtype that it gives weights."""
        module = self.module
        record = record_of(module)
        assert record is not None, "_apply of an experts module outlived its record"
        kept = {id(tensor) for tensor in _kept_tensors(module, record)}

        def apply(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in kept and result.dtype != tensor.dtype:
                result = tensor.to(result.device)
            return cast(Tensor, result)

        for codes in _codes(module):
            _let_go(codes)
        try:
            type(module)._apply(module, apply, recurse)
        finally:
            for codes in _codes(module):
                keep_without_gradient(codes)
        probe = fn(torch.empty(1, dtype=record.dtype, device=_device(module, record)))
        if probe.dtype in FLOATS and probe.dtype != record.dtype:
            setattr(module, RECORD, replace(record, dtype=probe.dtype))
        return module

    # Copies of a parameter lose what was set on it, so a copied module sets it again: copy and
    # pickle both end in __setstate__, with the same copied parameters that the module gets.
    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "codes": _codes(self.module)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module = state["module"]
        for codes in state["codes"]:
            keep_without_gradient(codes)


class _WithoutGradient:
    """Stand in for ``requires_grad_`` of int8 codes, which would raise for a whole model."""

    def __init__(self, codes: Tensor | None = None) -> None:
        self._codes = None if codes is None else weakref.ref(codes)

    def __call__(self, requires_grad: bool = True) -> Tensor | None:
        return None if self._codes is None else self._codes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _WithoutGradient, ()


class _SettableTensor(Protocol):
    requires_grad_: Any


def keep_without_gradient(codes: Tensor) -> None:
    """Let ``model.requires_grad_(True)`` pass int8 codes by instead of raising."""
    cast(_SettableTensor, codes).requires_grad_ = _WithoutGradient(codes)


def _let_go(codes: Tensor) -> None:
    """Take back what keep_without_gradient set: torch swaps no tensors that have weak references.

    It swaps on conversion if torch.__future__.set_swap_module_params_on_conversion says so.
    """
    codes.__dict__.pop("requires_grad_", None)


def forward_slot(module: nn.Module) -> str:
    """Return the attribute that holds a module's forward; accelerate's hooks keep it elsewhere."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def install(module: nn.Module, record: ExpertsRecord) -> None:
    """Make a module run on whatever of its weights is int8; weights may be exchanged later."""
    setattr(module, RECORD, record)
    if isinstance(module.__dict__.get("_apply"), ApplyKeepingCodes):
        return
    setattr(module, forward_slot(module), forward_of(module))
    setattr(module, "_apply", ApplyKeepingCodes(module))  # noqa: B010
    module.register_load_state_dict_pre_hook(_refuse_float_weights)
    module.register_load_state_dict_post_hook(_after_loading)


def _refuse_float_weights(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Report float weights that load_state_dict would truncate to codes, and keep the codes.

    Those that will be loaded are let go until then.
    """
    record, error_messages = record_of(module), rest[-1]
    assert record is not None, "the hook of an experts module outlived its record"
    for name in _names(record):
        value = state_dict.get(prefix + name)
        if value is not None and value.dtype != getattr(module, name).dtype:
            del state_dict[prefix + name]
            error_messages.append(
                f"{prefix}{name}: wanted {getattr(module, name).dtype}, got {value.dtype}; load "
                "float weights before int8moe_compile.quantize_, not after it"
            )
    for codes in _codes(module):
        _let_go(codes)


def _after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """Treat codes that load_state_dict(assign=True) put in place like those before them."""
    for codes in _codes(module):
        keep_without_gradient(codes)


def put_weight(
    module: nn.Module, name: str, codes: Tensor, scale: Tensor, input_scale: Tensor | None
) -> None:
    """Put codes, scale and, for static schemes, the activations' scale in place of a float weight.

    The scales are buffers: in the state dict and moved with the module, but no business of
    ``requires_grad_`` or an optimiser.
    """
    parameter = nn.Parameter(codes, requires_grad=False)
    keep_without_gradient(parameter)
    module._parameters[name] = parameter
    module.register_buffer(name + SCALE, scale)
    if input_scale is not None:
        module.register_buffer(name + INPUT_SCALE, input_scale)


def is_complete(module: nn.Module) -> bool:
    """Say whether a module is quantised in both of its weights."""
    return record_of(module) is not None and len(_codes(module)) == 2


def _names(record: ExpertsRecord) -> tuple[str, str]:
    return record.structure.w13_name, record.structure.w2_name


def _codes(module: nn.Module) -> list[Tensor]:
    """Return the int8 parameters that a module holds now."""
    record = record_of(module)
    assert record is not None, "an experts module without a record has no codes"
    return [getattr(module, name) for name in _names(record) if _has_codes(module, name)]


def _has_codes(module: nn.Module, name: str) -> bool:
    """Say whether a weight is int8 and, with its bias, in our layout already."""
    return cast(Tensor, getattr(module, name)).dtype == torch.int8


def _kept_tensors(module: nn.Module, record: ExpertsRecord) -> list[Tensor]:
    """Return codes and scales, whose dtype never changes."""
    scales = [
        getattr(module, name + suffix, None)
        for name in _names(record)
        for suffix in (SCALE, INPUT_SCALE)
    ]
    return [*_codes(module), *(scale for scale in scales if scale is not None)]


def _device(module: nn.Module, record: ExpertsRecord) -> torch.device:
    return cast(torch.device, getattr(module, record.structure.w13_name).device)
