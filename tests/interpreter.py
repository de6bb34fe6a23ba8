"""Run Triton kernels in the interpreter with a bf16 that rounds; import before the kernels.

Triton 3.6-3.7's interpreter truncates fp32 to bf16, converts integers to bf16 by their value as
bits, multiplies the bits of bf16 operands in ``tl.dot``, and rounds ``tl.fma`` twice. Removable
once it does not.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
_Builder = interpreter.InterpreterBuilder
_cast, _dot = _Builder.cast_impl, _Builder.create_dot


def _to_bf16(data: Any) -> Any:
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)


def _from_bf16(data: Any) -> Any:
    return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32).reshape(data.shape)


def _cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if target == tl.bfloat16 and source != tl.bfloat16:
        return Handle(_to_bf16(src.data), target)
    if source == tl.bfloat16 and target != tl.bfloat16:
        return _cast(self, Handle(_from_bf16(src.data), tl.float32), dst_type)
    return _cast(self, src, dst_type)


def _create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    if a.dtype.scalar == tl.bfloat16:
        a, b = (Handle(_from_bf16(x.data), tl.float32) for x in (a, b))
    return _dot(self, a, b, d, *rest)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    # Its own multiplies and adds in fp32. The product of two fp32 is exact in long double.
    wide = [np.asarray(part.data, dtype=np.longdouble) for part in (x, y, z)]
    with np.errstate(all="ignore"):
        return Handle((wide[0] * wide[1] + wide[2]).astype(np.float32), z.dtype.scalar)


_Builder.create_fma = _create_fma
_Builder.cast_impl = _cast_impl
_Builder.create_dot = _create_dot
for _name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
    setattr(_Builder, f"create_{_name}", lambda self, src, dst_type: self.cast_impl(src, dst_type))
