"""Pack int8 codes into int32 words and back, as the "pack-quantized" format stores them.

A word holds 32 / bits unsigned values of a row, the first one lowest; a value is its code plus
half of the range. Rows are padded with zeros to whole words.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_codes(codes: Tensor) -> Tensor:
    """Return int8 codes [..., rows, columns] as int32 words [..., rows, ceil(columns / 4)]."""
    assert codes.dtype == torch.int8, f"codes of {codes.dtype} cannot be packed"
    values = codes.contiguous().view(torch.uint8) ^ 0x80
    padding = -values.shape[-1] % 4
    return torch.nn.functional.pad(values, (0, padding)).contiguous().view(torch.int32)


def unpack_codes(words: Tensor, columns: int, bits: int = 8) -> Tensor:
    """Return int32 words as int8 codes [..., rows, columns]; bits: 2, 4 or 8."""
    assert bits in (2, 4, 8), f"{bits} bits do not divide a word"
    if bits == 8:
        values = words.contiguous().view(torch.uint8)[..., :columns]
        return (values ^ 0x80).view(torch.int8)
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (values.flatten(-2)[..., :columns] - (1 << (bits - 1))).to(torch.int8)
