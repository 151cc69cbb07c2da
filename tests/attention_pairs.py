"""An oracle for what is summed over pairs of queries and keys."""

import torch


def all_pairs(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """Sums of |q_c k_c| of query [B, heads, S, D] and key, with every pair in memory: float64 [kv_heads, D]."""
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, 1).double()
    pairs = (query.double()[:, :, :, None] * key[:, :, None]).abs()  # [B, heads, S of query, S of key, D]
    back = torch.arange(key.shape[2])[:, None] - torch.arange(key.shape[2])
    seen = (back >= 0) & (back < (window or len(back)))
    by_head = (pairs * seen[..., None]).sum((0, 2, 3))
    return torch.stack([heads.mean(0) for heads in by_head.split(group)])
