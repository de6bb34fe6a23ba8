"""INT8 experts for every Hugging Face mixture-of-experts model under torch.compile."""

from __future__ import annotations

from . import ops as _ops  # noqa: F401

__version__ = "0.1.0"
