"""The pass under CUDA's own autocast, without a GPU."""

from __future__ import annotations

import own_process


def test_pretended_graphs() -> None:
    own_process.run("pretended.py", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
