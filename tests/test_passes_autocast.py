"""The pass under CUDA's own autocast, without a GPU."""

from __future__ import annotations

import own_process


def test_pretended_graphs() -> None:
    # Without devices everywhere: their own guard is replaced.
    own_process.run("pretended.py", CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
