"""Register the operators with torch.library: schemas, kernels by device, fakes, autograd."""

from __future__ import annotations

import functools
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import registry
from ..compat import below_autograd, in_forward_mode, one_autograd_level
from ..compat_triton import plain_keys
from . import fake, quantize, schema
from .arguments import ExpertsArguments, with_finite_limit
from .checks import check_dequantize, check_experts, check_layouts
from .humming import check_humming

# define + impl, not custom_op: 4 us against 16 us a call, and a second registration fails loudly.
_library: Final = torch.library.Library(schema.NAMESPACE, "DEF")
for _schema in (
    schema.EXPERTS,
    schema.DEQUANTIZE,
    schema.NO_BACKWARD,
    schema.WGMMA_UP,
    schema.WGMMA_DOWN,
    schema.STREAM,
):
    _library.define(_schema)
# It compiles kernels and converts weights when first called, which a CUDA graph cannot record.
_library.define(schema.HUMMING_EXPERTS, tags=(torch.Tag.cudagraph_unsafe,))

experts = torch.ops.int8moe.experts
humming_experts = torch.ops.int8moe.humming_experts
dequantize = torch.ops.int8moe.dequantize


def operator_of(backend: str) -> torch._ops.OpOverload:
    """Return the operator of a backend: int8moe::experts but for one that has its own."""
    return humming_experts.default if backend == "humming" else experts.default


def _experts_cpu(*args: Any, **kwargs: Any) -> Tensor:
    call = ExpertsArguments(*args, **kwargs)
    check_experts(call, traced=False)
    result: Tensor = registry.kernel("cpu")(with_finite_limit(call))
    return result


def _experts_cuda(*args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = registry.kernel("cuda")(*args, **kwargs)
    return result


def _humming_kernel(*args: Any, **kwargs: Any) -> Tensor:
    call = ExpertsArguments(*args, **kwargs)
    check_experts(call, traced=False)
    check_humming(call)
    result: Tensor = registry.humming_kernel()(with_finite_limit(call))
    return result


def _without_strides(*args: Any, **kwargs: Any) -> NoReturn:
    check_layouts(ExpertsArguments(*args, **kwargs))
    raise AssertionError("the dispatcher sent dense tensors to the kernel of sparse ones")


def _dequantize_kernel(
    codes: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype,
    activation_quant: str = "token",
    a_scale: Tensor | None = None,
) -> Tensor:
    check_dequantize(codes, scale, dtype, activation_quant, a_scale)
    return quantize.dequantize(codes, scale, dtype).contiguous()


def _no_backward_kernel(grad: Tensor) -> Tensor:
    raise NotImplementedError(
        "int8moe::experts has no backward: INT8 experts are for inference. Run under "
        "torch.inference_mode() or torch.no_grad(), detach hidden_states and topk_weights, or "
        "train the model before int8moe_compile.quantize_."
    )


class _ForwardOnly(torch.autograd.Function):
    """Run the operator in grad mode; going backward through it raises when it runs.

    The backward returns an opaque operator whose kernel raises. A backward that raised by
    itself would stop torch.compile from tracing the forward, too.
    """

    @classmethod
    def record(cls, *args: Any) -> Tensor:
        """Apply it where torch.func's transforms may be going on, too.

        The dispatcher calls a kernel once a level of those, and Function.apply, which would begin
        with all of them again, refuses there.
        """
        with one_autograd_level():
            result: Tensor = super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
        return result

    @staticmethod
    def forward(
        ctx: Any, operator: Any, names: tuple[str, ...], rest: dict[str, Any], *tensors: Tensor
    ) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        with below_autograd():
            result: Tensor = operator(**dict(zip(names, tensors, strict=True)), **rest)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        grads = [
            torch.ops.int8moe.no_backward(grad.new_zeros(shape, dtype=dtype)) if want else None
            for want, (shape, dtype) in zip(wanted, ctx.like, strict=True)
        ]
        return (None, None, None, *grads)


_PLAIN_KEYS: Final = plain_keys()


def _experts_autograd(keys: Any, *args: Any, **kwargs: Any) -> Tensor:
    # Where nothing is to be done and nothing lies between, another dispatch changes nothing.
    is_plain = keys.raw_repr() == _PLAIN_KEYS and not in_forward_mode()
    if is_plain and not (torch.is_grad_enabled() and _wants_gradient(args, kwargs)):
        result: Tensor = registry.kernel("cuda")(*args, **kwargs)
        return result
    return _forward_only(experts.default, args, kwargs)


def _humming_autograd(*args: Any, **kwargs: Any) -> Tensor:
    return _forward_only(humming_experts.default, args, kwargs)


def _forward_only(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if in_forward_mode():
        _refuse_tangents(args, kwargs)
    if torch.is_grad_enabled() and _wants_gradient(args, kwargs):
        call = ExpertsArguments(*args, **kwargs)._asdict()
        tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in call.items() if name not in tensors}
        result: Tensor = _ForwardOnly.record(operator, tuple(tensors), rest, *tensors.values())
        return result
    with below_autograd():
        result = operator(*args, **kwargs)
    return result


def _refuse_tangents(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    """Refuse forward-mode differentiation, which would take the operator for a constant."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                "int8moe::experts has no derivative in forward mode (torch.func.jvp, "
                "torch.autograd.forward_ad): INT8 experts are for inference. Detach its inputs, or "
                "differentiate the model before int8moe_compile.quantize_."
            )


def _wants_gradient(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> bool:
    # plain loops: 6 us a call less than over the names of all arguments
    for tensor in args:
        if tensor.requires_grad:
            return True
    for value in kwargs.values():  # noqa: SIM110
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def _product_kernel(name: str, *args: Any) -> None:
    registry.product_kernel(name)(*args)


for _name in registry.PRODUCT_KERNELS:
    _library.impl(_name, functools.partial(_product_kernel, _name), "CUDA")
    torch.library.register_fake(f"int8moe::{_name}", fake.product, lib=_library)
_library.impl("experts", _experts_cpu, "CPU")
_library.impl("experts", _experts_cuda, "CUDA")
for _device in ("CPU", "CUDA"):
    _library.impl("humming_experts", _humming_kernel, _device)
for _layout in ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU"):
    _library.impl("experts", _without_strides, _layout)
    _library.impl("humming_experts", _without_strides, _layout)
_library.impl("experts", _experts_autograd, "Autograd", with_keyset=True)
_library.impl("humming_experts", _humming_autograd, "Autograd")
_library.impl("dequantize", _dequantize_kernel, "CompositeExplicitAutograd")
_library.impl("no_backward", _no_backward_kernel, "CompositeExplicitAutograd")
torch.library.register_fake("int8moe::experts", fake.experts, lib=_library)
torch.library.register_fake("int8moe::humming_experts", fake.humming_experts, lib=_library)
torch.library.register_fake("int8moe::dequantize", fake.dequantize, lib=_library)
torch.library.register_fake("int8moe::no_backward", fake.no_backward, lib=_library)
