"""Describe int8 weights in the words of compressed-tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .checkpoint_config import COMPRESSED_TENSORS
from .schemes import QuantKey, Scheme

INT_QUANTIZED: Final = "int-quantized"
PACK_QUANTIZED: Final = "pack-quantized"
MIXED: Final = "mixed-precision"


def scheme_format(scheme: Scheme) -> str:
    """Return the format in which a scheme's weights are stored: packed if weight-only."""
    return PACK_QUANTIZED if scheme.activation_key is None else INT_QUANTIZED


def quantization_config(
    groups: Sequence[tuple[Scheme, Sequence[str]]], ignore: Sequence[str]
) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint; groups pair schemes with targets."""
    formats = {scheme_format(scheme) for scheme, _ in groups}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {
            f"group_{index}": {
                "targets": list(targets),
                "weights": _arguments(scheme.weight_key),
                "input_activations": _arguments(scheme.activation_key),
                "output_activations": None,
                "format": scheme_format(scheme),
            }
            for index, (scheme, targets) in enumerate(groups)
        },
    }


def _arguments(key: QuantKey | None) -> dict[str, Any] | None:
    """Return one entry of a group."""
    if key is None:
        return None
    return {
        "num_bits": key.bits,
        "type": "int",
        "symmetric": key.symmetric,
        "strategy": key.granularity,
        "dynamic": key.dynamic,
        "group_size": key.group_size,
    }
