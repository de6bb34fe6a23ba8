"""What Inductor generates for CUDA, without a GPU: kernels, their order, their instructions."""

from __future__ import annotations

import own_process


def test_generated_source() -> None:
    own_process.run("generated.py", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
