"""Every version difference and every private name of torch that the package touches."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def below_autograd() -> AbstractContextManager[None]:
    """Return a context in which dispatch skips the autograd keys.

    Removable when torch.library offers an autograd registration that takes keyword-only
    tensors (register_autograd refuses them in 2.11-2.14).
    """
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-any-return]


def sizes_equal(left: Any, right: Any) -> bool:
    """Compare two sizes while tracing or not, without branching on an unbacked size.

    Backed sizes compare with an ordinary guard. For unbacked ones the answer is False only when
    they differ whatever their values; otherwise the equality becomes a runtime check.
    Removable when torch offers this in one public call.
    """
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import (
        free_unbacked_symbols,
        statically_known_true,
    )

    equal = left == right
    if statically_known_true(equal):
        return True
    if free_unbacked_symbols([left, right]):
        if statically_known_true(left != right):
            return False
        torch._check(equal)
        return True
    return bool(equal)
