"""Which local expert a contribution meets: ids, the expert map, and what contributes nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def local_experts(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """Return int64 [T, K]: the local expert of each contribution, -1 where there is none.

    topk_ids: [T, K] int32 or int64, global ids when expert_map [G] is given. An id or a mapped
    value outside its range contributes nothing and is never used as an index.
    """
    ids = topk_ids.to(torch.int64)
    if expert_map is not None:
        if expert_map.numel() == 0:
            return torch.full_like(ids, -1)
        known = (ids >= 0) & (ids < expert_map.numel())
        mapped = expert_map.to(torch.int64)[torch.where(known, ids, 0)]
        ids = torch.where(known, mapped, -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)
